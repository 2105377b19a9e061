"""Outliers beside a grid: which they are, what is stored of them, and KVQuant whole; each against numpy."""

import numpy as np
import oracle
import pytest
import torch
from cache_inputs import HKV, PREFILLS, D, bodies_equal, cut, new_cache, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from test_model import small
from test_nonuniform import nearest
from test_remat import close, ids_of, logits

from kvmini import CachePolicy, KvminiError, Side, UniformQuantizer
from kvmini.quantizers.base import FLOATS
from kvmini.quantizers.exact import ExactQuantizer
from kvmini.quantizers.nonuniform import Codebook, StaticQuantizer, TokenwiseQuantizer, even_levels
from kvmini.quantizers.sparse import StaticOutliers, TopOutliers, thresholds

GRID = UniformQuantizer(2, "per_token", 8)


def merged(x):
    """`[B, Hkv, T, D]` -> `[B, T, Hkv * D]` in numpy."""
    return x.transpose(1, 2).flatten(2).numpy()


def half(x):
    """Float64 goes by way of float32, as in torch."""
    return x.astype(np.float32).astype(np.float16).astype(x.dtype)


# --- which numbers are outliers

@pytest.mark.parametrize("share", [0.01, 0.1])
def test_thresholds_leave_half_the_share_on_either_end(share):
    x = tokens(2000)[1][0] ** 3
    low, high = thresholds(x, share)
    assert low.shape == high.shape == (HKV, 1, D)
    for found, at in ((low, share / 2), (high, 1 - share / 2)):
        np.testing.assert_allclose(found.numpy(), np.quantile(x.numpy(), at, axis=1, keepdims=True), rtol=1e-6)
    assert ((x < low).sum(1) == 2000 * share / 2).all() and ((x > high).sum(1) == 2000 * share / 2).all()


@given(st.integers(0, 99))
def test_beyond_known_thresholds_numbers_are_kept_and_leave_the_end_of_the_range(seed):
    x, (low, high) = tokens(20, batch=2, seed=seed)[1], thresholds(tokens(200, seed=1000)[1][0], 0.2)
    quantizer = StaticOutliers(GRID, low, high)
    clipped = np.clip(x.numpy(), low.numpy(), high.numpy())
    outlier, grid = clipped != x.numpy(), oracle.uniform(clipped.reshape(2, HKV, 20, 2, 8), 2)[3].reshape(x.shape)
    stored = quantizer.quantize(x)
    close(quantizer.dequantize(stored), torch.from_numpy(np.where(outlier, half(x.numpy()), grid)), 1e-12)
    places = np.argwhere(merged(torch.from_numpy(outlier)))  # row, token, channel
    assert 0 < len(places) < x.numel() / 2
    assert (stored.parts["channels"].numpy()[:, 0] == places[:, 2]).all()
    outlier = merged(torch.from_numpy(outlier))
    assert (stored.parts["values"].numpy()[:, 0] == half(merged(x)[outlier])).all()
    assert (stored.parts["counts"][:, 0, :, 0].numpy() == outlier.sum(-1)).all()


@given(st.sampled_from([0.01, 0.1, 0.3]), st.integers(0, 99))
def test_the_largest_and_smallest_of_a_token_over_all_heads(share, seed):
    x = tokens(12, batch=2, seed=seed)[1]
    k, channels = max(1, round(share * HKV * D / 2)), merged(x)
    order = channels.argsort(-1)
    wanted, outlier = channels.copy(), np.zeros(channels.shape, bool)
    for end, limit in ((order[..., :k], order[..., k:k + 1]), (order[..., -k:], order[..., -k - 1:-k])):
        np.put_along_axis(wanted, end, np.take_along_axis(channels, limit, -1), -1)
        np.put_along_axis(outlier, end, True, -1)
    grid = oracle.uniform(wanted.reshape(2, 12, HKV, 2, 8), 2)[3].reshape(channels.shape)
    stored = TopOutliers(GRID, share).quantize(x)
    close(torch.from_numpy(merged(TopOutliers(GRID, share).dequantize(stored))),
          torch.from_numpy(np.where(outlier, half(channels), grid)), 1e-12)
    assert (stored.parts["counts"] == 2 * k).all()


def test_equal_numbers_need_no_place():
    stored = TopOutliers(UniformQuantizer(2, "per_token", 4)).quantize(
        torch.tensor([[0.0, 0, 3, 3], [1, 1, 1, 1], [0, 1, 2, 9]]))
    assert stored.parts["counts"].tolist() == [[0], [0], [2]] and stored.parts["channels"].tolist() == [[0], [3]]


def test_an_outlier_spares_the_others_its_range():
    x = torch.rand(1, 1, 50, 64, generator=torch.Generator().manual_seed(0))
    x[..., 7] = 100.0
    grid = UniformQuantizer(2, "per_token", 64)
    errors = [(q.dequantize(q.quantize(x)) - x).norm() for q in (grid, TopOutliers(grid))]
    assert errors[1] < errors[0] / 5  # from 0 .. 1 the root mean square to 0 is 1/sqrt(3), to a level 1/(3 sqrt(12))


# --- KVQuant whole

@pytest.mark.parametrize("bits", [2, 3, 4])
def test_kvquant_as_in_numpy(bits):
    """Keys: thresholds and ranges of other text, levels fitted to it; values: their own; outliers of both apart."""
    known, x = tokens(300, seed=5)[1][0] ** 3 / 8, tokens(20, batch=2)[1] ** 3 / 8
    low, high = (np.quantile(known.numpy(), at, axis=1, keepdims=True).astype(np.float32).astype(np.float64)
                 for at in (0.005, 0.995))
    book = Codebook(torch.linspace(-1, 1, 2**bits).double() ** 3).normalized(torch.rand(999).double() - 0.5)
    levels, values = book.levels.numpy(), book.values.numpy()

    keys = StaticOutliers(StaticQuantizer(book, *map(torch.from_numpy, (low, high))), *thresholds(known, 0.01))
    codes, _ = nearest((np.clip(x.numpy(), low, high) - (high + low) / 2) / ((high - low) / 2), levels)
    dense = values[codes] * (high - low) / 2 + (high + low) / 2
    outlier = (x.numpy() < low) | (x.numpy() > high)
    assert 0 < outlier.mean() < 0.05
    close(keys.dequantize(keys.quantize(x)), torch.from_numpy(np.where(outlier, half(x.numpy()), dense)), 1e-6)

    channels = merged(x)
    by_size = np.sort(channels, -1)
    inner = np.clip(channels, by_size[..., 1:2], by_size[..., -2:-1])
    low16 = inner.min(-1, keepdims=True).astype(np.float16)
    low16 = np.where(low16 > inner.min(-1, keepdims=True), np.nextafter(low16, np.float16(-np.inf)), low16)
    width = (inner.max(-1, keepdims=True) - low16.astype(np.float64)) / 2
    width16 = width.astype(np.float16)
    width16 = np.where(width16 < width, np.nextafter(width16, np.float16(np.inf)), width16).astype(np.float64)
    middle = low16.astype(np.float64) + width16
    dense = values[nearest((inner - middle) / width16, levels)[0]] * width16 + middle
    found = TopOutliers(TokenwiseQuantizer(book))
    close(torch.from_numpy(merged(found.dequantize(found.quantize(x)))),
          torch.from_numpy(np.where(inner != channels, half(channels), dense)), 1e-6)


@pytest.mark.parametrize("prefill", PREFILLS)
def test_around_exact_storage_the_logits_are_those_of_the_exact_cache(prefill):
    """Outliers that float16 holds exactly: 0, for which the weights of one channel are 0, and thresholds above it."""
    model, ids = small(), ids_of(24)
    with torch.no_grad():
        for layer in model.layers:
            for linear in (layer.attention.k, layer.attention.v):
                linear.weight[5] = 0
    low = torch.full((HKV, 1, D), -1e9, dtype=torch.float64)
    low[0, 0, 5] = 0.5  # channel 5 of the first head, always 0, is below its range
    side = Side(StaticOutliers(ExactQuantizer(), low, torch.full_like(low, 1e9)), residual_length=5)
    expected = model(ids).detach()
    for sizes in ([24], [9, 12, 1, 1, 1]):
        cache = model.new_cache(CachePolicy(side, side, sinks=2, pre_rope=True, prefill=prefill))
        close(logits(model, ids, cache, sizes), expected, 1e-9)
        assert {int(store.body.parts["counts"].sum()) for store in cache.stores()} == {17}


# --- bytes, blocks, dtypes, mistakes

@pytest.mark.parametrize(("heads", "channels", "kind"), [(32, 128, torch.int16), (3, 64, torch.uint8),
                                                         (1, 255, torch.uint8), (1, 256, torch.int16)])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_bytes_are_those_of_the_grid_and_of_every_outlier_and_count(heads, channels, kind, bits):
    x = torch.randn(1, heads, 50, channels, generator=torch.Generator().manual_seed(bits))
    x[..., -1] = 30.0 + torch.rand(1, heads, 50)  # the last place is used
    grid = TokenwiseQuantizer(even_levels(bits))
    stored = TopOutliers(grid).quantize(x)
    a_token = 2 * max(1, round(0.005 * heads * channels))
    size = torch.empty(0, dtype=kind).element_size()
    assert stored.parts["channels"].dtype == stored.parts["counts"].dtype == kind
    assert stored.parts["channels"].max() == heads * channels - 1
    assert stored.nbytes == grid.quantize(x).nbytes + 50 * (a_token * (2 + size) + size)
    assert torch.equal(TopOutliers(grid).dequantize(stored)[..., -1].half(), x[..., -1].half()) == (heads == 1)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_kvquants_bits_at_the_papers_sizes(bits):
    """32 heads of 128, 1%: b + 0.32 for outliers and places, 16 bits a token for their count, 32 for its range."""
    known, x = (torch.randn(1, 32, n, 128, generator=torch.Generator().manual_seed(n)) for n in (4000, 300))
    low, high = thresholds(known[0], 0.01)
    keys = StaticOutliers(StaticQuantizer(even_levels(bits), low, high), low, high).quantize(x)
    share = keys.parts["values"].numel() / x.numel()
    assert keys.bits_per_element == pytest.approx(bits + 32 * share + 16 / 4096, abs=1e-9)
    assert abs(share - 0.01) < 0.001
    values = TopOutliers(TokenwiseQuantizer(even_levels(bits))).quantize(x)
    of_token = 2 * round(0.005 * 4096)
    assert values.bits_per_element == bits + (32 * of_token + 16 + 32) / 4096
    assert bits + 0.32 < (keys.bits_per_element + values.bits_per_element) / 2 < bits + 0.35  # 3.32 to 3.35 at 3 bits


@settings(max_examples=15)
@given(st.booleans(), st.integers(0, 3), st.integers(0, 9), st.integers(0, 99))
def test_how_a_sequence_is_cut_does_not_change_what_a_cache_stores(grouped, sinks, residual, seed):
    _, k, v = tokens(40, batch=3, seed=seed)
    low, high = thresholds(tokens(200, seed=1000)[1][0], 0.1)
    inner = UniformQuantizer(2, "per_channel", 8) if grouped else GRID
    policy = CachePolicy(Side(StaticOutliers(inner, low, high), residual),
                         Side(TopOutliers(TokenwiseQuantizer(even_levels(2))), residual), sinks, pre_rope=True)
    whole, pieces = new_cache(policy), new_cache(policy)
    for cache, sizes in ((whole, [40]), (pieces, cut(40, seed))):
        for part in zip(k.split(sizes, dim=-2), v.split(sizes, dim=-2), strict=True):
            cache.append(0, *part)
    assert bodies_equal(whole, pieces) and whole.nbytes == pieces.nbytes <= whole.capacity_nbytes
    k_hat, v_hat = whole.read(0)
    pieces.crop(20)
    pieces.reorder([2, 0, 0])
    for found, before in zip(pieces.read(0), (k_hat, v_hat), strict=True):
        close(found, before[[2, 0, 0], :, :20])
    pieces.crop(0)
    assert pieces.nbytes == 0


def test_take_and_cat_are_inverse_row_by_row_and_token_by_token():
    quantizer, x = TopOutliers(GRID, 0.3), tokens(9, batch=3)[1]
    x[1, :, 4] = 0.0  # a token without outliers
    stored = quantizer.quantize(x)
    first, rest = quantizer.quantize(x[:, :, :4]), quantizer.quantize(x[:, :, 4:])
    for piece in (quantizer.cat(first, rest), quantizer.extend(first, x[:, :, 4:]), quantizer.take(
            stored, rows=torch.tensor([0, 1, 2]), blocks=9)):
        assert all(torch.equal(piece.parts[name], stored.parts[name]) for name in stored.parts)
    some = quantizer.take(stored, rows=torch.tensor([2, 1, 1]), blocks=5)
    wanted = quantizer.quantize(x[[2, 1, 1], :, :5])
    assert all(torch.equal(some.parts[name], wanted.parts[name]) for name in wanted.parts)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("wrap", [TopOutliers,
                                  lambda grid: StaticOutliers(grid, torch.tensor(-1.0), torch.tensor(1.0))])
def test_every_dtype_comes_back_and_nothing_is_nothing(wrap, dtype):
    quantizer, x = wrap(UniformQuantizer(8, "per_token", 8)), tokens(8)[1].to(dtype)
    x_hat = quantizer.dequantize(quantizer.quantize(x))
    assert x_hat.dtype == dtype and (x_hat - x).double().abs().max() < 0.6
    empty = quantizer.quantize(x[..., :0, :])
    assert quantizer.dequantize(empty).shape == (1, HKV, 0, D) and (empty.nbytes, empty.bits_per_element) == (0, 0.0)


@pytest.mark.parametrize(("call", "says"), [
    (lambda: TopOutliers(GRID).quantize(torch.tensor([[1e5] + [1.0] * 7])), "outlier of 100000 does not fit float16"),
    (lambda: TopOutliers(GRID, 1.0).quantize(torch.ones(1, 8)), "8 outliers of a token of 8 channels leave nothing"),
    (lambda: TopOutliers(GRID).quantize(torch.full((1, 8), np.nan)), "8 of 8 are NaN"),
    (lambda: StaticOutliers(GRID, torch.tensor(0.0), torch.tensor(1.0)).quantize(torch.full((1, 8), np.inf)), "NaN")])
def test_mistakes_are_one_line(call, says):
    with pytest.raises(KvminiError, match=says) as error:
        call()
    assert "\n" not in str(error.value)
