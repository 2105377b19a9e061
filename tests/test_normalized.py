"""InnerQ: factors per channel, measured or known, against numpy."""

import numpy as np
import pytest
import torch
from cache_inputs import HKV, PREFILLS, D, H, bodies_equal, comes_back, cut, new_cache, run, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from test_model import small
from test_remat import close, ids_of, logits

from kvmini import CachePolicy, KvminiError, Side, UniformQuantizer
from kvmini.quantizers.base import FLOATS
from kvmini.quantizers.exact import ExactQuantizer
from kvmini.quantizers.hybrid import HybridQuantizer
from kvmini.quantizers.normalized import NormalizedQuantizer, ScaledQuantizer, channel_factors

WARM = 128
GRID = UniformQuantizer(3, "per_token", 8, symmetric=True)


def symmetric(x, bits):
    """On groups along the last axis, the scale float16 and no smaller than it has to be: (scale, x_hat)."""
    x = np.asarray(x, np.float64)
    wanted = np.abs(x).max(-1, keepdims=True) / (2 ** (bits - 1) - 1)
    scale = wanted.astype(np.float16)
    scale = np.where(scale < wanted, np.nextafter(scale, np.float16(np.inf)), scale).astype(np.float64)
    return scale, np.rint(x / np.where(scale > 0, scale, 1)) * scale


def measured(x):
    """The factors of the first 128 tokens, float16, of `[B, Hkv, T, D]` in numpy."""
    return np.sqrt(np.abs(x[:, :, :WARM]).max(2, keepdims=True)).astype(np.float16).astype(np.float64)


def same(a, b):
    return a.shape == b.shape and all(torch.equal(a.parts[name], b.parts[name]) for name in a.parts | b.parts)


def shared(x):
    return x.repeat_interleave(H // HKV, dim=1)


# --- factors

@pytest.mark.parametrize("T", [5, 128, 150])
def test_keys_are_divided_by_the_root_of_the_largest_of_the_first_128_tokens(T):
    k = tokens(T, batch=2)[1]
    k[:, :, 128:] *= 100  # counts for nothing
    k[1, 1, :, 7] = 0.0
    stored = NormalizedQuantizer(GRID).quantize(k)
    factor = measured(k.numpy())
    factor[1, 1, 0, 7] = 1
    assert stored.parts["factor"].dtype == torch.float16 and (stored.parts["factor"].numpy() == factor).all()
    scale, x_hat = symmetric((k.numpy() / factor).reshape(2, HKV, T, 2, 8), 3)
    assert (stored.scale.numpy() == scale[..., 0]).all()
    close(NormalizedQuantizer(GRID).dequantize(stored), torch.from_numpy(x_hat.reshape(k.shape) * factor), 1e-12)


def test_known_factors_are_the_same_grid_and_cost_nothing():
    k = tokens(40, batch=2)[1]
    factor = channel_factors(k[0])
    assert (factor.numpy() == np.sqrt(np.abs(k[0].numpy()).max(1, keepdims=True))).all()
    quantizer = ScaledQuantizer(GRID, factor)
    stored = quantizer.quantize(k)
    scale, x_hat = symmetric((k / factor).numpy().reshape(2, HKV, 40, 2, 8), 3)
    assert (stored.scale.numpy() == scale[..., 0]).all() and stored.nbytes == GRID.quantize(k).nbytes
    close(quantizer.dequantize(stored), torch.from_numpy(x_hat.reshape(k.shape)) * factor, 1e-12)


def test_factors_keep_a_large_channel_from_setting_the_scale_of_its_neighbours():
    k = tokens(150)[1]  # channel 3 is twenty times the others
    errors = [(q.dequantize(q.quantize(k)) - k)[..., :3].norm() for q in (GRID, NormalizedQuantizer(GRID))]
    assert errors[1] < 0.6 * errors[0]


@pytest.mark.parametrize("known", [True, False])
def test_a_scaled_query_reads_keys_without_their_factors(known):
    q, k, _ = tokens(30, batch=2)
    quantizer = ScaledQuantizer(GRID, channel_factors(k[0])) if known else NormalizedQuantizer(GRID)
    stored = quantizer.quantize(k)
    assert H > HKV and not torch.equal(quantizer.map_query(q, stored), q)
    scores = quantizer.map_query(q, stored) @ shared(GRID.dequantize(stored)).mT
    close(scores, q @ shared(quantizer.dequantize(stored)).mT)
    assert quantizer.map_output(q, stored) is q


@pytest.mark.parametrize("pre_rope", [True, False])
@pytest.mark.parametrize("wrap", [
    NormalizedQuantizer, lambda inner: ScaledQuantizer(inner, tokens(1, seed=5)[1][0].abs() + 0.1)])
@pytest.mark.parametrize("prefill", PREFILLS)
def test_around_exact_storage_the_logits_are_those_of_the_exact_cache(wrap, pre_rope, prefill):
    model, ids, side = small(context_length=256), ids_of(150), Side(wrap(ExactQuantizer()), residual_length=5)
    expected = model(ids).detach()
    for sizes in ([150], [100, 47, 1, 1, 1]):
        cache = model.new_cache(CachePolicy(side, side, sinks=2, pre_rope=pre_rope, prefill=prefill))
        close(logits(model, ids, cache, sizes), expected, 1e-9)
        assert {store.body.n_tokens for store in cache.stores()} == {143}


# --- a sequence's own factors, in a cache

def own(flush=None, sinks=1, prefill="exact"):
    """A cache whose keys have factors of their own, R 3."""
    return new_cache(CachePolicy(Side(NormalizedQuantizer(GRID), 3, flush), Side(GRID), sinks, prefill=prefill))


@pytest.mark.parametrize("flush", [1, 48])
def test_a_cache_waits_for_128_tokens_and_then_freezes_their_factors(flush):
    """Sinks 1, R 3: with F 48 the first hand-over is of 144 tokens, of which 128 are measured."""
    _, k, v = tokens(200, batch=2)
    cache, first, counts = own(flush), -(-WARM // flush) * flush, []
    seen = cache.rope.apply(k, range(200))[:, :, 1:]
    for t in range(200):
        cache.append(0, k[..., t:t + 1, :], v[..., t:t + 1, :])
        counts.append((body := cache.keys[0].body).n_tokens)
        assert not counts[-1] or (body.parts["factor"].numpy() == measured(seen.numpy())).all()
    assert counts == [n // flush * flush if n >= first else 0 for n in range(-3, 197)]
    assert same(body, NormalizedQuantizer(GRID).quantize(seen[:, :, :counts[-1]]))


@settings(max_examples=15)
@given(st.sampled_from(PREFILLS), st.integers(0, 3), st.sampled_from([0, 5, 40]), st.integers(1, 2), st.booleans(),
       st.integers(0, 99))
def test_how_a_sequence_is_cut_does_not_change_what_a_cache_stores(prefill, sinks, residual, blocks, rope, seed):
    _, k, v = tokens(190, seed=seed)
    keys = NormalizedQuantizer(UniformQuantizer(2, "per_channel", 16))
    sides = Side(keys, residual, 16 * blocks), Side(NormalizedQuantizer(HybridQuantizer(3, "per_token", 8)), residual)
    policy = CachePolicy(*sides, sinks, rope, prefill)
    whole, pieces = new_cache(policy), new_cache(policy)
    for cache, sizes in ((whole, [190]), (pieces, cut(190, seed))):
        for part in zip(k.split(sizes, dim=-2), v.split(sizes, dim=-2), strict=True):
            cache.append(0, *part)
    assert bodies_equal(whole, pieces) and whole.values[0].body.n_tokens == 190 - sinks - residual


def test_streamed_is_one_token_at_a_time_across_the_warm_up():
    q, k, v = tokens(150)
    outputs = [run(own(prefill="streamed"), q, k, v, sizes) for sizes in ([1] * 150, [150], [100, 50])]
    for output in outputs[1:]:
        close(output, outputs[0])


@pytest.mark.parametrize("n", [0, 1, 2])
def test_after_a_crop_to_nothing_stored_factors_are_measured_anew(n):
    """Two sinks: nothing is stored of 0, 1 or 2 tokens, and nothing is held for it."""
    (q, k, v), (_, k2, v2) = tokens(160), tokens(160, seed=1)
    cache, fresh = own(sinks=2), own(sinks=2)
    run(cache, q, k, v, [160])
    cache.crop(n)
    assert cache.nbytes == cache.capacity_nbytes == 2 * n * HKV * D * 8
    if n:
        fresh.append(0, k[..., :n, :], v[..., :n, :])
    for c in (cache, fresh):
        c.append(0, 9 * k2[..., n:, :], v2[..., n:, :])
    assert same(cache.keys[0].body, fresh.keys[0].body) and cache.nbytes == fresh.nbytes <= cache.capacity_nbytes
    close(cache.read(0)[0], fresh.read(0)[0])


def test_factors_outlive_a_crop_that_leaves_a_token_and_move_with_their_rows():
    q, k, v = tokens(160, batch=3)
    k *= torch.tensor([1.0, 5.0, 25.0])[:, None, None, None]
    cache, rows = own(), [2, 0, 0]
    run(cache, q, k, v, [160])
    factor, keys = cache.keys[0].body.parts["factor"], cache.read(0)[0]
    cache.crop(2)
    assert torch.equal(cache.keys[0].body.parts["factor"], factor) and cache.keys[0].body.n_tokens == 1
    cache.reorder(rows)
    assert torch.equal(cache.keys[0].body.parts["factor"], factor[rows])
    cache.append(0, k[rows][..., 2:, :], v[rows][..., 2:, :])
    close(cache.read(0)[0], keys[rows])


def test_pieces_join_only_with_the_same_factors():
    quantizer, x = NormalizedQuantizer(GRID), tokens(170)[1]
    whole, first = quantizer.quantize(x), quantizer.quantize(x[:, :, :128])
    assert same(quantizer.extend(first, x[:, :, 128:]), whole) and same(quantizer.take(whole, blocks=128), first)
    doubled = quantizer.take(whole, rows=torch.tensor([0, 0]))
    assert torch.equal(quantizer.dequantize(doubled), quantizer.dequantize(whole).repeat(2, 1, 1, 1))
    with pytest.raises(KvminiError, match="different factors cannot be joined"):
        quantizer.cat(first, quantizer.quantize(x[:, :, 128:]))
    joined = quantizer.cat(first, first)
    assert joined.n_tokens == 256 and joined.nbytes == 2 * first.nbytes - 2 * HKV * D  # the factors once
    empty = quantizer.quantize(x[:, :, :0])
    for piece in (quantizer.cat(empty, first), quantizer.cat(first, empty), quantizer.extend(empty, x[:, :, :128])):
        assert same(piece, first)


# --- bytes, dtypes, mistakes

@pytest.mark.parametrize(("heads", "channels"), [(2, 128), (3, 64)])
def test_bytes_are_the_papers(heads, channels):
    """InnerQ's keys at 3 bits take 3.5, and its values at 2 bits 2.5 or, hybrid, 2 + 33/32; factors are extra."""
    x = torch.randn(1, heads, 128, channels, generator=torch.Generator().manual_seed(0))
    keys, values = UniformQuantizer(3, "per_token", 32, True), UniformQuantizer(2, "per_channel", 32, True)
    for grid, said in ((keys, 3.5), (values, 2.5), (HybridQuantizer(2, "per_channel", 32), 2 + 33 / 32)):
        assert grid.quantize(x).bits_per_element == said and 8 * grid.quantize(x).nbytes == said * x.numel()
        for n in (32, 128):
            stored = NormalizedQuantizer(grid).quantize(x[:, :, :n])
            assert 8 * stored.nbytes == heads * channels * (said * n + 16)
    assert UniformQuantizer(2, "per_channel", 32).quantize(x).bits_per_element == (3.5 + 2.5) / 2  # KIVI's
    tokenwise = HybridQuantizer(3, "per_token", 32).quantize(x)  # groups of a token: their bits fill a byte
    assert tokenwise.nbytes == x.numel() * 3 // 8 + 4 * x.numel() // 32 + heads * 128


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("quantizer", [
    NormalizedQuantizer(UniformQuantizer(8, "per_token", 8)),
    ScaledQuantizer(UniformQuantizer(8, "per_channel", 8), torch.full((2, 1, 1), 0.3))])
def test_every_dtype_comes_back_and_nothing_is_nothing(quantizer, dtype):
    comes_back(quantizer, dtype)


@pytest.mark.parametrize(("call", "says"), [
    (lambda: NormalizedQuantizer(GRID).quantize(torch.full((2, 8), 1e10)), "factor of 100000 does not fit float16"),
    (lambda: NormalizedQuantizer(GRID).quantize(torch.full((2, 8), np.inf)), "16 of 16 are NaN or inf"),
    (lambda: ScaledQuantizer(GRID, torch.zeros(1)).quantize(torch.ones(1, 8)), "once transformed")])
def test_mistakes_are_one_line(call, says):
    with pytest.raises(KvminiError, match=says) as error:
        call()
    assert "\n" not in str(error.value)
