"""FP8: its bytes against torch's own float8 types and an oracle in numpy, its scales, and a cache that holds it."""

import numpy as np
import pytest
import torch
from cache_inputs import HKV, PREFILLS, D, bodies_equal, cut, new_cache, run, tokens
from hypothesis import given
from hypothesis import strategies as st

from kvmini import CachePolicy, KvminiError, Side
from kvmini.quantizers.base import FLOATS
from kvmini.quantizers.float8 import Float8Quantizer, numbers, scale_of, scale_of_heads

TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LARGEST, TOP = {"e4m3": 448.0, "e5m2": 57344.0}, {"e4m3": 0x7E, "e5m2": 0x7B}  # TOP is the code of LARGEST
both = pytest.mark.parametrize("format", TORCH)
every_dtype = pytest.mark.parametrize("dtype", FLOATS)


def sizes(format):
    """The codes from 0.0 up to the largest number, and their numbers as torch reads them."""
    codes = torch.arange(TOP[format] + 1, dtype=torch.uint8)
    return codes, codes.view(TORCH[format]).double()


def nearest(format, x):
    """An oracle in float64 numpy: the nearest of all numbers, half way the even code; no exponents, no mantissas."""
    x, grid = np.asarray(x, np.float64), sizes(format)[1].numpy()
    upper = np.searchsorted(grid, np.abs(x)).clip(1, len(grid) - 1)
    below, above = np.abs(x) - grid[upper - 1], grid[upper] - np.abs(x)
    code = np.where((above < below) | ((above == below) & (upper % 2 == 0)), upper, upper - 1)
    return torch.from_numpy((code + 128 * np.signbit(x)).astype(np.uint8))


def everywhere(dtype, seed, T):
    """`[2, HKV, T, D]` of every exponent of the type, subnormal ones too; every other number where the grids are."""
    random, info = torch.Generator().manual_seed(seed), torch.finfo(dtype)
    low, high = np.log2(info.smallest_normal) + np.log2(info.eps) - 2, np.log2(info.max)
    unit, sign = torch.rand(2, 2, HKV, T, D, generator=random, dtype=torch.float64)
    exponents = torch.where(torch.arange(D) % 2 == 0, low + (high - low) * unit, -20 + 36 * unit)
    return ((2.0**exponents).clamp(max=info.max) * torch.where(sign < 0.5, -1, 1)).to(dtype)


@both
@every_dtype
def test_every_code_means_what_torch_reads_and_its_number_comes_back_to_the_last_bit(format, dtype):
    codes, x = sizes(format)
    codes, x = torch.cat([codes, codes + 128])[None], torch.cat([x, -x])[None]
    for scale in (1.0, 0.25, torch.tensor(0.5, requires_grad=True)):
        quantizer, y = Float8Quantizer(format, scale), (x * scale).to(dtype)
        y_hat = quantizer.dequantize(stored := quantizer.quantize(y))
        assert torch.equal(stored.codes(), codes) and y_hat.dtype == dtype and not y_hat.requires_grad
        assert torch.equal(y_hat, y) and torch.equal(y_hat.signbit(), y.signbit())
    assert torch.equal(numbers(format).isnan(), ~torch.isin(torch.arange(256), codes))  # which are never written


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_half_way_goes_to_the_even_code_and_a_hair_off_to_the_nearer(format, dtype):
    codes, x = sizes(format)
    middle, lower, upper = ((x[1:] + x[:-1]) / 2).to(dtype), codes[:-1], codes[1:]
    for y, expected in ((middle, torch.where(lower % 2 == 0, lower, upper)),
                        (torch.nextafter(middle, torch.zeros_like(middle)), lower),
                        (torch.nextafter(middle, torch.full_like(middle, torch.inf)), upper)):
        stored = Float8Quantizer(format).quantize(torch.stack([y, -y]))
        assert torch.equal(stored.codes(), torch.stack([expected, expected + 128]))


@both
@every_dtype
@given(seed=st.integers(0, 999))
@np.errstate(over="ignore")
def test_bytes_are_those_of_torch_and_the_oracle_at_any_scale(format, dtype, seed):
    x, (_, k, _), most = everywhere(dtype, seed, 12), tokens(7, seed=seed), torch.finfo(dtype).max
    arithmetic = np.float64 if dtype == torch.float64 else np.float32
    for scale in (1.0, 0.1, scale_of(k, format), scale_of_heads(k, format), k[0, :, :1].abs() + 0.1):
        quantizer, s = Float8Quantizer(format, scale), np.asarray(scale, arithmetic)
        stored = quantizer.quantize(x)
        y = (x.double().numpy().astype(arithmetic) / s).clip(-LARGEST[format], LARGEST[format])
        assert torch.equal(stored.codes(), nearest(format, y))
        if dtype != torch.float64:  # from which torch rounds twice
            assert torch.equal(stored.codes(), torch.from_numpy(y).to(TORCH[format]).view(torch.uint8))
        x_hat = torch.from_numpy(stored.codes().view(TORCH[format]).double().numpy().astype(arithmetic) * s)
        assert torch.equal(quantizer.dequantize(stored), x_hat.clamp(-most, most).to(dtype))


@both
@every_dtype
def test_too_large_becomes_the_largest_of_the_grid_and_of_the_type(format, dtype):
    most, scale = torch.finfo(dtype).max, torch.finfo(torch.float32).max
    stored = Float8Quantizer(format, 2.0**-149).quantize(torch.tensor([[most], [-most]], dtype=dtype))  # y is inf
    assert stored.codes().tolist() == [[TOP[format]], [TOP[format] + 128]]
    top, bottom = Float8Quantizer(format, scale).dequantize(stored)
    assert top == -bottom == min(most, LARGEST[format] * scale)


@both
def test_scales_are_the_largest_magnitude_over_the_largest_number(format):
    x = torch.zeros(2, 3, 5, 4, dtype=torch.float16)
    x[0, 0, 3, 1], x[1, 2, 0, 0] = -7, 14
    seven, fourteen = (np.float32(n / LARGEST[format]) for n in (7, 14))
    assert scale_of_heads(x, format).tolist() == [[[seven]], [[1]], [[fourteen]]]
    assert scale_of(x, format) == fourteen and scale_of(x[:, 1], format) == 1
    for extreme in torch.tensor([[[1e-320]], [[1e308]]], dtype=torch.float64):
        Float8Quantizer(format, scale_of(extreme, format))  # is not refused


@both
@given(st.floats(1e-3, 1e3), st.integers(0, 6), st.integers(0, 6), st.integers(0, 99))
def test_pieces_are_the_whole_in_8_bits_and_larger_numbers_stay_larger(format, scale, n, more, seed):
    quantizer, x = Float8Quantizer(format, scale), everywhere(torch.float32, seed, n + more)
    whole, a, b = (quantizer.quantize(part) for part in (x, x[..., :n, :], x[..., n:, :]))
    for got, wanted in ((quantizer.cat(a, b), whole), (quantizer.take(whole, blocks=n), a),
                        (quantizer.take(whole, rows=torch.tensor([1])), quantizer.quantize(x[1:]))):
        assert got.shape == wanted.shape and torch.equal(got.codes(), wanted.codes())
    assert whole.nbytes == x.numel() and whole.bits_per_element == (8.0 if n + more else 0.0)
    assert (quantizer.dequantize(whole).flatten()[x.flatten().argsort()].diff() >= 0).all()


@both
@given(st.sampled_from(PREFILLS), st.integers(0, 4), st.integers(0, 9), st.booleans(), st.integers(0, 99))
def test_how_a_sequence_is_cut_does_not_change_what_a_cache_stores(format, prefill, sinks, residual, pre_rope, seed):
    q, k, v = tokens(40, seed=seed)
    sides = (Side(Float8Quantizer(format, scale_of_heads(x, format)), residual) for x in (k, v))
    policy = CachePolicy(*sides, sinks, pre_rope, prefill)
    whole, pieces = new_cache(policy), new_cache(policy)
    run(whole, q, k, v, [40])
    run(pieces, q, k, v, cut(40, seed))
    body, wanted = whole.values[0].body, policy.value.quantizer.quantize(v[..., sinks:40 - residual, :])
    assert bodies_equal(whole, pieces) and torch.equal(body.codes(), wanted.codes()) and body.bits_per_element == 8


@pytest.mark.parametrize("scale", [
    0, -1.0, np.inf, np.nan, 1e39, "1", torch.tensor([[1.0, 0.0]]), torch.tensor(1e-50, dtype=torch.float64),
    *map(torch.ones, [(2, 1, 1), (3, 5, 1), (2, 3, 1, 1), (1, 3, 1, 1), (3,)])])
def test_a_scale_is_positive_and_finite_and_the_same_for_every_token_and_row(scale):
    fine = isinstance(scale, torch.Tensor) and (scale == 1).all()
    with pytest.raises(KvminiError, match=r"does not fit \[2, 3, 5, 8\]" if fine else "^scale must be positive"):
        Float8Quantizer(scale=scale).quantize(torch.ones(2, 3, 5, 8))


def test_mistakes_are_refused():
    for call in (scale_of, scale_of_heads, lambda x, format: Float8Quantizer(format).quantize(x)):
        for says, bad, format in (("e4m3, e5m2, not 'fp8'", 1.0, "fp8"), ("8 of 8 are NaN", np.nan, "e4m3")):
            with pytest.raises(KvminiError, match=says):
                call(torch.full((1, 2, 4), bad), format)
    for says, shape in (("no heads", (2, 4)), ("no numbers", (2, 0, 4))):
        with pytest.raises(KvminiError, match=says):
            scale_of_heads(torch.ones(shape), "e4m3")
