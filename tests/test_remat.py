"""Rematerialisation: the layer input kept, K and V computed again; and the same in the basis of the projections."""

from dataclasses import replace

import numpy as np
import oracle
import pytest
import torch
from cache_inputs import HKV, PREFILLS, D, H, cut
from test_model import small, text

from kvmini import CachePolicy, KvminiError, Rope, Side, UniformQuantizer
from kvmini.evaluate import filled
from kvmini.quantizers.basis import BasisQuantizer
from kvmini.quantizers.exact import ExactQuantizer
from kvmini.remat import RematPolicy, XCache

BIASED = {"biases": ("q", "k", "v")}
EXACT, GRID = Side(ExactQuantizer()), Side(UniformQuantizer(2, "per_token", 16))
WINDOWED = replace(GRID, residual_length=5, flush_length=3)


def of_input(model, side):
    return RematPolicy(side, sinks=2)


def of_latents(model, side):
    """XQuant's form for grouped-query attention: each layer's keys and values in the basis of its projections."""
    def in_basis(name):
        def quantizer(layer):
            linear = getattr(model.layers[layer].attention, name)
            return BasisQuantizer.of(linear.weight.detach(), linear.bias, side.quantizer)
        return replace(side, quantizer=quantizer)
    return CachePolicy(in_basis("k"), in_basis("v"), sinks=2, pre_rope=True)


def ids_of(n, batch=1):
    return torch.randint(0, 50, (batch, n), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, ids, cache, sizes):
    return torch.cat([model(part, cache) for part in ids.split(sizes, dim=1)], dim=1)


def inputs(n, batch=1, hidden=48):
    """Projections with biases; q, and the k and v that they make of a layer input x with one large channel."""
    torch.manual_seed(0)
    x = torch.randn(batch, n, hidden, dtype=torch.float64)
    x[..., 5] *= 9
    projections = [torch.nn.Linear(hidden, HKV * D).double().requires_grad_(False) for _ in "kv"]
    k, v = (f(x).unflatten(-1, (HKV, D)).transpose(1, 2) for f in projections)
    return projections, torch.randn(batch, H, n, D, dtype=torch.float64), k, v, x


def attend(cache, tokens, sizes):
    parts = zip(*(t.split(sizes, dim=-2) for t in tokens), strict=True)
    return torch.cat([cache.attend(0, *part) for part in parts], dim=-2)


def close(got, expected, tolerance=1e-10):
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


# --- nothing is lost but by the grid

@pytest.mark.parametrize("changes", [{}, BIASED, {"n_kv_heads": 1}, {"n_kv_heads": 4, **BIASED}])  # 4: 64 keys of 48
@pytest.mark.parametrize("form", [of_input, of_latents])
@pytest.mark.parametrize("prefill", PREFILLS)
def test_exact_storage_gives_the_logits_of_the_exact_cache(changes, form, prefill):
    model, ids = small(**changes), ids_of(24)
    for sizes in ([24], [1] * 24, [9, 15]):
        cache = model.new_cache(replace(form(model, EXACT), prefill=prefill))
        close(logits(model, ids, cache, sizes), model(ids).detach())
        assert {store.body.n_tokens for store in cache.stores()} == {22}


@pytest.mark.slow
@pytest.mark.parametrize("form", [of_input, of_latents])
def test_exact_storage_gives_the_default_models_logits(loaded, form):
    model, tokenizer = loaded
    ids = text(tokenizer, 24)
    for sizes in ([24], [10, *[1] * 14]):
        close(logits(model, ids, model.new_cache(form(model, EXACT)), sizes), model(ids), 1e-8)


@pytest.mark.parametrize("prefill", PREFILLS)
def test_attention_is_that_of_quantized_inputs_projected_in_numpy(prefill):
    """Of the second of two calls; sinks 2, R 5, F 3."""
    projections, q, k, v, x = inputs(30)
    cache = XCache([projections], Rope(D, 1000.0), RematPolicy(WINDOWED, 2, prefill))
    got, x = attend(cache, (q, k, v, x), [12, 18])[0], x[0].numpy()
    stored = oracle.uniform(x.reshape(30, 3, 16), 2)[3].reshape(x.shape)
    angles = np.arange(30)[:, None] / 1000.0 ** (2 * np.arange(D // 2) / D)
    for i in range(12, 30):
        end = i + 1 if prefill == "all" else 2 + ((12 if prefill == "exact" else i) - 2 - 5) // 3 * 3
        x_hat = np.concatenate([x[:2], stored[2:end], x[end:i + 1]])
        for head in range(H):
            shared = slice(head // 2 * D, (head // 2 + 1) * D)
            keys, values = (x_hat @ f.weight[shared].numpy().T + f.bias[shared].numpy() for f in projections)
            pairs = (keys[:, :D // 2] + 1j * keys[:, D // 2:]) * np.exp(1j * (angles[:i + 1] - angles[i]))
            query = q[0, head, i, :D // 2].numpy() - 1j * q[0, head, i, D // 2:].numpy()
            weights = np.exp((pairs @ query).real / D**0.5)
            close(got[head, i], torch.from_numpy(weights @ values / weights.sum()))


# --- calls, crop, reorder

def test_what_is_stored_does_not_depend_on_the_calls():
    projections, *tokens = inputs(40, batch=2)
    caches = [XCache([projections], Rope(D), RematPolicy(WINDOWED, 2)) for _ in range(3)]
    for cache, sizes in zip(caches, ([40], [1] * 40, cut(40, 1)), strict=True):
        attend(cache, tokens, sizes)
        body, first = cache.inputs[0].body, caches[0].inputs[0].body
        assert body.shape == (2, 1, 33, 48) and cache.nbytes == caches[0].nbytes
        assert all(torch.equal(part, first.parts[name]) for name, part in body.parts.items())


@pytest.mark.parametrize("form", [of_input, of_latents])
def test_streamed_is_one_token_at_a_time_after_a_crop_too(form):
    model, ids, outputs = small(**BIASED), ids_of(40), []
    for sizes in ([30], [1] * 30, cut(30, 2)):
        cache = model.new_cache(replace(form(model, WINDOWED), prefill="streamed"))
        logits(model, ids[:, :20], cache, [20])
        cache.crop(10)
        outputs.append(logits(model, ids[:, 10:], cache, sizes))
        close(outputs[-1], outputs[0])
    assert (outputs[0] - model(ids)[:, 10:]).abs().max() > 1e-3


def test_crop_is_as_if_less_had_been_fed_and_reorder_moves_rows():
    model, ids, rows = small(**BIASED), ids_of(40, batch=3), [2, 0, 0]
    exact = logits(model, ids[rows], model.new_cache(), [40])[:, 25:]
    for side, lost in ((EXACT, False), (GRID, True)):
        cache, plain = (model.new_cache(of_input(model, side)) for _ in range(2))
        logits(model, ids, cache, [40])
        cache.crop(25)
        cache.reorder(rows)
        logits(model, ids[rows, :25], plain, [25])
        assert cache.nbytes == plain.nbytes <= cache.capacity_nbytes and cache.positions == range(25)
        more = logits(model, ids[rows, 25:], cache, [1] * 15)
        close(more, logits(model, ids[rows, 25:], plain, [1] * 15))
        assert ((more - exact).abs().max() > 1e-3) == lost


def test_filled_caches_hold_what_a_run_of_their_own_would_store():
    model, prompts = small(**BIASED), ids_of(30, batch=2)
    policies = [of_input(model, WINDOWED), None, of_latents(model, WINDOWED)]
    for policy, cache in zip(policies, filled(model, prompts, policies), strict=True):
        own = model.new_cache(policy)
        model(prompts, own)
        assert all(torch.equal(a, b) for n in (0, 1) for a, b in zip(cache.read(n), own.read(n), strict=True))


# --- bytes

@pytest.mark.parametrize(("n_bits", "G", "hidden", "heads", "bits"), [
    (2, 128, 384, 2, 2.25 * 1.5), (2, 128, 128, 1, 2.25), (4, 32, 384, 2, 5 * 1.5), (8, 64, 64, 1, 8.5 / 2)])
def test_bytes_are_the_closed_form_and_bits_are_those_of_keys_and_values(n_bits, G, hidden, heads, bits):
    """A token takes hidden * b/8 bytes of codes, 2 + 2 for each group; it stands for 2 * heads * 64 elements."""
    projections = [torch.nn.Linear(hidden, heads * 64)] * 2
    cache = XCache([projections] * 3, Rope(64), RematPolicy(Side(UniformQuantizer(n_bits, "per_token", G)), sinks=4))
    assert (cache.nbytes, cache.bits_per_element, cache.body_bits_per_element) == (0, 0.0, None)
    for layer in range(3):
        cache.append(layer, *torch.randn(2, 2, heads, 20, 64), torch.randn(2, 20, hidden))
    body, sinks = 3 * 2 * 16 * (hidden * n_bits // 8 + 4 * hidden // G), 3 * 2 * 4 * hidden
    assert cache.nbytes == body + 4 * sinks <= cache.capacity_nbytes
    assert cache.body_bits_per_element == bits
    assert cache.bits_per_element_at(16) == (8 * body + 16 * sinks) / (3 * 2 * 20 * 2 * heads * 64)
    assert cache.bits_per_element == (8 * body + 32 * sinks) / (3 * 2 * 20 * 2 * heads * 64)


# --- mistakes

def test_mistakes_are_named_and_not_kept():
    projections, q, k, v, x = inputs(6)
    cache, clean = (XCache([projections] * 2, Rope(D), RematPolicy(GRID)) for _ in range(2))
    cache.append(1, k, v, x)
    clean.append(1, k, v, x)
    for wrong in (None, x.float(), x[:, :5], x[..., :8], x.expand(2, -1, -1), x[0]):
        with pytest.raises(KvminiError, match=r"needs the layer input, torch.float64 \[1, 6, 48\] .*not "):
            cache.attend(1, q, k, v, wrong)
    x[0, 2, 3] = torch.nan
    with pytest.raises(KvminiError, match=r"layer 1, layer input: .*1 of 288"):
        cache.append(1, k, v, x)
    x[0, 2, 3] = 0
    with pytest.raises(KvminiError, match=r"the cache holds torch.float64 \[1, 1, T, 48\] and cannot take"):
        cache.append(1, *(t.repeat(2, *[1] * (t.ndim - 1)) for t in (k, v, x)))
    hook = projections[1].register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        cache.append(1, k, v, x)
    hook.remove()
    assert torch.equal(cache.attend(1, q, k, v, x), clean.attend(1, q, k, v, x)) and cache.nbytes == clean.nbytes
    for settings, says in (({"sinks": -1}, "sinks"), ({"prefill": "none"}, "streamed")):
        with pytest.raises(KvminiError, match=says):
            RematPolicy(GRID, **settings)
