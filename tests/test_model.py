"""The decoder on the real model: against an independent forward, and against itself in other cuts."""

from dataclasses import replace

import pytest
import torch
from oracle import llama_logits

from kvmini import Config, KvminiError, Llama, Rope, generate, policies
from kvmini.metrics import Tap
from kvmini.texts import prose


def small(**changes):
    torch.manual_seed(0)
    config = Config(n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, hidden_size=48, ffn_size=64, vocab_size=50,
                    context_length=128, norm_eps=1e-5, rope=Rope(16))
    return Llama(replace(config, **changes)).double()


def text(tokenizer, n, start=0):
    return torch.tensor([tokenizer.encode(prose("search"))[start:start + n]])


# --- a small random model

@pytest.mark.parametrize("changes", [{}, {"tied": False}, {"n_kv_heads": 1}, {"n_kv_heads": 4},
                                     {"rope": Rope(16, 500.0)}])
def test_logits_are_those_of_an_independent_forward(changes):
    model = small(**changes)
    ids = torch.randint(0, 50, (1, 40), generator=torch.Generator().manual_seed(1))
    expected = llama_logits(model.state_dict(), model.config, ids[0].numpy())
    torch.testing.assert_close(model(ids)[0].detach(), torch.from_numpy(expected), rtol=1e-10, atol=1e-10)


def test_batch_rows_do_not_see_each_other():
    model, ids = small(), torch.randint(0, 50, (3, 20), generator=torch.Generator().manual_seed(2))
    together = model(ids)
    for row in range(3):
        torch.testing.assert_close(together[row:row + 1], model(ids[row:row + 1]), rtol=1e-10, atol=1e-10)


def test_last_only_is_the_last_row():
    model, ids = small(), torch.arange(20)[None]
    torch.testing.assert_close(model(ids, last_only=True), model(ids)[:, -1:], rtol=1e-10, atol=1e-10)


def test_gradients_flow_to_keys_and_values():
    """Against a finite difference: calibration needs the gradient of the loss by stored keys and values."""
    model, ids = small().requires_grad_(False), torch.arange(12)[None]
    direction = torch.randn(1, 2, 12, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(4))

    def loss(nudge, which, grads=None):
        def on_attend(layer, q, k, v):
            if layer == 0:
                leaf = (k, v)[which]
                leaf += nudge * direction
                if grads is not None:
                    grads.append(leaf.requires_grad_())
        logits = model(ids, Tap(2, model.config.rope, on_attend))
        return torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])

    for which in (0, 1):
        leaves = []
        loss(0.0, which, leaves).backward()
        numeric = (loss(1e-5, which) - loss(-1e-5, which)) / 2e-5
        torch.testing.assert_close((leaves[0].grad * direction).sum(), numeric, rtol=1e-5, atol=1e-8)
        assert numeric.abs() > 1e-5


def test_a_call_without_gradients_leaves_nothing_that_forbids_them_later():
    model, ids = small(), torch.arange(17)[None]
    with torch.inference_mode():
        model(ids)
    model(ids).sum().backward()
    assert model.embedding.weight.grad.abs().max() > 0


def test_norms_are_taken_in_float32():
    x = torch.full((1, 1, 64), 1000.0, dtype=torch.float16)  # 1000^2 does not fit float16
    norm = small().layers[0].ffn_norm
    norm.weight.data = torch.ones(64, dtype=torch.float16)
    assert torch.equal(norm(x), torch.ones_like(x)) and torch.equal(norm(-x), -torch.ones_like(x))


@pytest.mark.parametrize("policy", ["exact", "k=per_channel:2:8,v=per_token:2:8,residual=8"])
@pytest.mark.parametrize(("before", "layer"), [(20, 1), (20, 0), (0, 1)])
def test_an_interrupted_call_leaves_the_cache_where_it_was(policy, before, layer):
    model, ids = small(), torch.arange(30)[None]
    cache, clean = model.new_cache(policies.get(policy)), model.new_cache(policies.get(policy))
    if before:
        model(ids[:, :before], cache)
        model(ids[:, :before], clean)
    hook = model.layers[layer].ffn.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model(ids[:, before:], cache)
    hook.remove()
    assert {store.length for store in cache.stores()} == {before} and cache.nbytes == clean.nbytes
    assert torch.equal(model(ids[:, before:], cache), model(ids[:, before:], clean))


@pytest.mark.parametrize("ids", [torch.tensor([[50]]), torch.tensor([[-1]]), torch.zeros(1, 0, dtype=torch.long),
                                 torch.zeros(3, dtype=torch.long), torch.zeros(1, 3), torch.zeros(1, 129).long()])
def test_ids_that_are_no_tokens_or_too_many_are_refused(ids):
    with pytest.raises(KvminiError):
        small()(ids)


def test_heads_must_share_evenly():
    with pytest.raises(KvminiError, match=r"4 query heads.*3"):
        small(n_kv_heads=3)


# --- generation

def test_greedy_generation_is_the_argmax_of_the_uncached_model():
    model, ids = small(tied=False), torch.randint(0, 50, (2, 5), generator=torch.Generator().manual_seed(3))
    out = generate(model, ids, model.new_cache(), max_new_tokens=10)
    assert len(out.unique()) > 5
    for _ in range(10):
        ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(out, ids[:, 5:])


def test_sampling_follows_the_softmax_and_its_seed():
    model, ids = small(), torch.tensor([[7]]).expand(4000, 1)
    draws = generate(model, ids, model.new_cache(), max_new_tokens=1, temperature=9.0, seed=5)
    assert torch.equal(draws, generate(model, ids, model.new_cache(), 1, temperature=9.0, seed=5))
    assert not torch.equal(draws, generate(model, ids, model.new_cache(), 1, temperature=9.0, seed=6))
    wanted = torch.softmax(model(ids[:1])[0, -1] / 9.0, -1)
    share = torch.bincount(draws[:, 0], minlength=50) / 4000
    assert ((share - wanted).abs() < 5 * (wanted * (1 - wanted) / 4000).sqrt() + 1e-3).all()


def test_a_row_that_stopped_repeats_its_stop_token_until_all_have():
    model, ids, seen = small(tied=False), torch.tensor([[1, 2], [3, 4], [5, 6]]), []
    free = generate(model, ids, model.new_cache(), max_new_tokens=12)
    stop = {int(free[0, 3]), int(free[1, 7]), int(free[2, 5])}
    out = generate(model, ids, model.new_cache(), max_new_tokens=12, stop=stop, on_token=seen.append)
    assert torch.equal(torch.stack(seen, 1), out)
    first = [next(i for i, token in enumerate(row.tolist()) if token in stop) for row in free]
    assert out.shape[1] == max(first) + 1 < 12 and len(set(first)) > 1
    for row, end in enumerate(first):
        assert torch.equal(out[row, :end + 1], free[row, :end + 1])
        assert (out[row, end:] == free[row, end]).all()


def test_a_temperature_near_zero_is_greedy_not_a_crash():
    model, ids = small(tied=False).float(), torch.tensor([[1, 2]])
    greedy = generate(model, ids, model.new_cache(), 8)
    for temperature in (1e-9, 1e-40, 1e-300):
        assert torch.equal(generate(model, ids, model.new_cache(), 8, temperature), greedy)


@pytest.mark.parametrize("settings", [{"max_new_tokens": 0}, {"temperature": -0.1}, {"temperature": float("nan")}])
def test_bad_generation_settings_are_refused(settings):
    model = small()
    with pytest.raises(KvminiError):
        generate(model, torch.tensor([[1]]), model.new_cache(), **settings)


# --- the real model

@pytest.mark.slow
def test_the_default_model_gives_the_logits_of_the_oracle(loaded, loaded32):
    """256 tokens; the float32 model within 1e-3, the float64 one to rounding; the same greedy tokens."""
    model, tokenizer = loaded
    ids = text(tokenizer, 256)
    expected = torch.from_numpy(llama_logits(model.state_dict(), model.config, ids[0].numpy()))
    assert (model(ids)[0] - expected).abs().max() < 1e-9
    got = loaded32[0](ids)[0].double()
    assert (got - expected).abs().max() < 1e-3
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.mark.slow
def test_uncached_cached_and_chunked_agree_to_rounding(loaded):
    model, tokenizer = loaded
    ids = text(tokenizer, 96)
    whole = model(ids)
    covered = policies.get("k=per_channel:2:32,v=per_token:2:32,residual=96,pre-rope,sinks=2")
    for policy, sizes in ((None, [1] * 96), (None, [7, 30, 1, 58]), (covered, [1] * 96), (covered, [50, 46])):
        cache = model.new_cache(policy)
        parts = torch.cat([model(part, cache) for part in ids.split(sizes, dim=1)], dim=1)
        assert (parts - whole).abs().max() < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["c-t-2", "k=per_channel:2:32,v=per_token:2:32,residual=32,sinks=4,pre-rope",
                                    "k=per_channel:4:32,k-flush=64,v=per_channel:2:32,v-residual=16"])
def test_streamed_is_a_real_one_token_decode(loaded, policy):
    model, tokenizer = loaded
    ids = text(tokenizer, 100)
    cache = model.new_cache(policies.get(policy))
    decoded = torch.cat([model(token, cache) for token in ids.split(1, dim=1)], dim=1)
    for sizes in ([100], [70, 30]):
        streamed = model.new_cache(policies.get(f"{policies.NAMED.get(policy, policy)},prefill=streamed"))
        parts = torch.cat([model(part, streamed) for part in ids.split(sizes, dim=1)], dim=1)
        assert (parts - decoded).abs().max() < 1e-6
        assert (decoded - model(ids)).abs().max() > 0.1  # and it is not the exact model that they agree on
        assert streamed.nbytes == cache.nbytes
