"""KVQuant's levels: k-means, ranges known beforehand or a token's own, Q-Norm; each against numpy."""

import numpy as np
import pytest
import torch
from cache_inputs import HKV, PREFILLS, D, bodies_equal, comes_back, cut, new_cache, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from test_model import small
from test_remat import close, ids_of, logits

from kvmini import CachePolicy, KvminiError, Side
from kvmini.metrics import Tap
from kvmini.quantizers.base import FLOATS
from kvmini.quantizers.nonuniform import (
    BINS,
    Codebook,
    StaticQuantizer,
    TokenwiseQuantizer,
    even_levels,
    fitted_levels,
)

UNEVEN = Codebook(torch.tensor([-0.9, -0.2, 0.05, 1.0], dtype=torch.float64))


def nearest(u, levels):
    """The lower one half way between two: (codes, levels there)."""
    levels = np.asarray(levels, np.float64)
    codes = np.abs(np.asarray(u, np.float64)[..., None] - levels).argmin(-1)
    return codes, levels[codes]


def ranges(x, over):
    """Low, high, middle and half as kept in float64."""
    low, high = x.min(over, keepdims=True), x.max(over, keepdims=True)
    return low, high, (low + high) / 2, (high - low) / 2


# --- a codebook

@given(st.integers(1, 8), st.integers(0, 999))
def test_a_code_is_the_nearest_level(bits, seed):
    random = torch.Generator().manual_seed(seed)
    levels = torch.rand(2**bits, generator=random, dtype=torch.float64).mul(2).sub(1).sort().values
    u = torch.randn(3, 50, generator=random, dtype=torch.float64)
    codes, values = nearest(u.numpy(), levels.numpy())
    book = Codebook(levels)
    assert book.n_bits == bits and (book.encode(u).numpy() == codes).all()
    assert (book.decode(book.encode(u), torch.float64).numpy() == values).all()


def test_half_way_between_two_levels_is_the_lower_one():
    assert Codebook(torch.tensor([-1.0, 0.0, 0.5, 1.0])).encode(torch.tensor([-0.5, 0.25, 0.75])).tolist() == [0, 1, 2]


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("weighted", [True, False])
def test_levels_are_a_fixed_point_of_k_means_and_better_than_even_ones(bits, weighted):
    """Each level is the weighted mean of the numbers nearest to it, but for a bin's width and a last small step."""
    random = np.random.default_rng(bits)
    u = np.clip(random.normal(size=20000) * 0.3, -1, 1)
    weights = random.exponential(size=u.shape) * (1 + 9 * (u > 0.2)) if weighted else np.ones(u.shape)
    levels = fitted_levels(torch.from_numpy(u), bits, torch.from_numpy(weights) if weighted else None).levels.numpy()
    codes, values = nearest(u, levels)
    means = np.bincount(codes, weights * u) / np.bincount(codes, weights)
    assert np.abs(means - levels).max() < 2 / BINS + 0.01
    lost, lost_evenly = ((weights * (u - x)**2).sum() for x in (values, nearest(u, even_levels(bits).levels)[1]))
    assert lost < 0.8 * lost_evenly


def test_two_levels_by_hand_and_what_weighs_nothing_counts_for_nothing():
    u = torch.tensor([-1.0, -0.9, 0.9, 1.0, 0.3, -0.2])
    weights = torch.tensor([3.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    levels = fitted_levels(u, 1, weights).levels
    close(levels, torch.tensor([-0.975, 0.95]), 1e-6)
    assert torch.equal(fitted_levels(u[:4], 1, weights[:4]).levels, levels)
    assert torch.equal(fitted_levels(u, 1, 2.0**-40 * weights).levels, levels)  # gradients can be this small
    assert torch.equal(fitted_levels(u, 1, weights).levels, levels)  # k-means starts alike


def test_even_levels_are_the_uniform_grid():
    assert even_levels(2).levels.tolist() == pytest.approx([-1, -1 / 3, 1 / 3, 1])
    assert [len(even_levels(bits).levels) for bits in range(1, 9)] == [2**bits for bits in range(1, 9)]


@pytest.mark.parametrize("seed", range(3))
def test_q_norm_gives_mean_and_deviation_back(seed):
    u = torch.randn(4000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.3 + 0.1
    rounded = nearest(u.numpy(), UNEVEN.levels.numpy())[1]
    book = UNEVEN.normalized(u)
    found = book.decode(book.encode(u), torch.float64).numpy()
    assert abs(rounded.std() - u.numpy().std()) > 1e-3  # there is something to give back
    assert abs(found.mean() - u.numpy().mean()) < 1e-6 and abs(found.std() - u.numpy().std()) < 1e-6
    assert torch.equal(book.encode(u), UNEVEN.encode(u))  # rounding is as before


# --- ranges known beforehand, and a token's own

@given(st.integers(1, 4), st.booleans(), st.sampled_from(["per channel", "per tensor"]), st.integers(0, 99))
def test_static_ranges_as_in_numpy(bits, even, per, seed):
    known, x = tokens(50, seed=1000)[1], tokens(20, batch=2, seed=seed)[1]
    known[0, 1, :, 4] = 3.0  # a channel without width comes back as its one number
    over = 1 if per == "per channel" else (0, 1, 2)
    low, high, middle, half = ranges(known[0].numpy(), over)
    levels = even_levels(bits).levels if even else fitted_levels(known / known.abs().max(), bits).levels
    quantizer = StaticQuantizer(Codebook(levels.double()), torch.from_numpy(low), torch.from_numpy(high))
    u = np.divide(x.numpy() - middle, half, out=np.zeros(x.shape), where=half > 0)
    codes, values = nearest(u, levels.numpy())
    stored = quantizer.quantize(x)
    assert (stored.codes().numpy() == codes).all()
    close(quantizer.dequantize(stored), torch.from_numpy(values * half + middle), 1e-12)
    assert stored.nbytes == -(-D * bits // 8) * 2 * HKV * 20  # the codes and nothing else


@given(st.integers(1, 4), st.integers(0, 99))
def test_a_tokens_own_range_as_in_numpy(bits, seed):
    """Over all its heads; the stored minimum is at most the token's, the stored range covers it."""
    x = tokens(20, batch=2, seed=seed)[1]
    levels = torch.tensor([-1.0, 0.3]) if bits == 1 else torch.linspace(-1, 1, 2**bits)**3
    low, high, _, _ = ranges(x.numpy(), (1, 3))
    start, width = low.astype(np.float16), None
    start = np.where(start > low, np.nextafter(start, np.float16(-np.inf)), start)
    width = ((high - start.astype(np.float64)) / 2).astype(np.float16)
    short = width < (high - start.astype(np.float64)) / 2
    width = np.where(short, np.nextafter(width, np.float16(np.inf)), width).astype(np.float64)
    middle = start.astype(np.float64) + width
    codes, values = nearest((x.numpy() - middle) / width, levels.numpy())
    quantizer = TokenwiseQuantizer(Codebook(levels))
    stored = quantizer.quantize(x)
    assert stored.minimum.dtype == torch.float16 and stored.minimum.shape == (2, 1, 20, 1)
    assert (stored.minimum.numpy() == start).all() and (stored.parts["half"].numpy() == width).all()
    assert (stored.codes().numpy() == codes).all()
    close(quantizer.dequantize(stored), torch.from_numpy(values * width + middle), 1e-12)


@pytest.mark.parametrize("prefill", PREFILLS)
def test_with_a_level_for_every_number_the_logits_are_those_of_the_exact_cache(prefill):
    """6 tokens of 2 heads of 16 channels are 192 numbers: 8 bits have a level for each."""
    model, ids = small(), ids_of(7)
    kept = []
    with torch.no_grad():
        model(ids, Tap(2, model.config.rope, lambda layer, q, k, v: kept.append((k, v))))

    def side(which):
        def quantizer(layer):
            x = kept[layer][which][..., :6, :].flatten()
            most = x.abs().max()
            levels = torch.cat([x / most, torch.full((256 - len(x),), 2.0)]).sort().values
            return StaticQuantizer(Codebook(levels), -most.view(1, 1, 1), most.view(1, 1, 1))
        return Side(quantizer)
    cache = model.new_cache(CachePolicy(side(0), side(1), pre_rope=True, prefill=prefill))
    close(logits(model, ids, cache, [4, 2, 1]), model(ids).detach(), 1e-9)  # the last token sees itself exactly
    assert {store.body.n_tokens for store in cache.stores()} == {7}


@pytest.mark.parametrize(("heads", "channels"), [(32, 128), (3, 64)])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_bytes_are_codes_and_for_values_two_float16_numbers_a_token(heads, channels, bits):
    x = torch.randn(1, heads, 10, channels)
    static = StaticQuantizer(even_levels(bits), torch.tensor(-3.0), torch.tensor(3.0)).quantize(x)
    assert static.bits_per_element == bits and 8 * static.nbytes == bits * x.numel()
    tokenwise = TokenwiseQuantizer(even_levels(bits)).quantize(x)
    assert tokenwise.nbytes == static.nbytes + 4 * 10 and tokenwise.bits_per_element == bits + 32 / (heads * channels)


@settings(max_examples=15)
@given(st.integers(0, 3), st.integers(0, 9), st.integers(0, 99))
def test_how_a_sequence_is_cut_does_not_change_what_a_cache_stores(sinks, residual, seed):
    _, k, v = tokens(40, batch=2, seed=seed)
    low, high = torch.full((HKV, 1, D), -2.0), torch.full((HKV, 1, D), 2.0)
    policy = CachePolicy(Side(StaticQuantizer(UNEVEN, low, high), residual), Side(TokenwiseQuantizer(UNEVEN), residual),
                         sinks, pre_rope=True)
    whole, pieces = new_cache(policy), new_cache(policy)
    for cache, sizes in ((whole, [40]), (pieces, cut(40, seed))):
        for part in zip(k.split(sizes, dim=-2), v.split(sizes, dim=-2), strict=True):
            cache.append(0, *part)
    assert bodies_equal(whole, pieces) and whole.keys[0].body.n_tokens == 40 - sinks - residual
    pieces.crop(20)
    pieces.reorder([1])
    close(pieces.read(0)[1], whole.read(0)[1][1:, :, :20])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("quantizer", [TokenwiseQuantizer(even_levels(8)), StaticQuantizer(
    even_levels(8), torch.tensor(-80.0), torch.tensor(80.0))])
def test_every_dtype_comes_back_and_nothing_is_nothing(quantizer, dtype):
    comes_back(quantizer, dtype)


@pytest.mark.parametrize(("call", "says"), [
    (lambda: even_levels(9), "n_bits must be"), (lambda: fitted_levels(torch.rand(99), 0), "n_bits must be"),
    (lambda: fitted_levels(torch.tensor([0.1, 0.5, 0.9]), 2), "4 levels cannot be fitted to 3 different"),
    (lambda: TokenwiseQuantizer(UNEVEN).quantize(torch.full((1, 1, 1, 8), 7e4)), "does not fit float16"),
    (lambda: TokenwiseQuantizer(UNEVEN).quantize(torch.tensor([[-6e4, np.nan]])), "1 of 2 are NaN"),
    (lambda: StaticQuantizer(UNEVEN, torch.tensor(0.0), torch.tensor(1.0)).quantize(torch.tensor([[np.inf]])),
     "1 of 1 are NaN")])
def test_mistakes_are_one_line(call, says):
    with pytest.raises(KvminiError, match=says) as error:
        call()
    assert "\n" not in str(error.value)
