"""The grid of least stored error, told by what it minimises: no group worse, and every group a regression."""

import numpy as np
import pytest
import torch
from cache_inputs import bodies_equal, cut, new_cache, run, tokens
from hypothesis import given
from hypothesis import strategies as st
from test_remat import close

from kvmini import CachePolicy, KvminiError, Side, UniformQuantizer
from kvmini.quantizers.base import FLOATS
from kvmini.quantizers.least_squares import LeastSquaresQuantizer

AXES = ("per_token", "per_channel")
G = 16


def numbers(seed, dtype=torch.float64, T=32, heads=2, channels=32):
    """`[1, heads, T, D]`, a large channel, every other seed with a long tail."""
    x = torch.randn(1, heads, T, channels, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x[..., 3] *= 20
    return (x**3 if seed % 2 else x).to(dtype)


def rows(x, axis, group=G):
    """Groups `[n, G]` in float64 numpy."""
    return (x if axis == "per_token" else x.mT).reshape(-1, group).double().numpy()


def read(stored, axis, group=G):
    """Codes `[n, G]`, scale and minimum `[n, 1]`, in the order of `rows`."""
    scale, minimum = ((part if axis == "per_token" else part.mT).reshape(-1, 1).double().numpy()
                      for part in (stored.scale, stored.minimum))
    return rows(stored.codes(), axis, group), scale, minimum


def errors(stored, x, axis, group=G):
    codes, scale, minimum = read(stored, axis, group)
    return ((codes * scale + minimum - rows(x, axis, group)) ** 2).sum(1)


def test_four_numbers_at_one_bit_by_hand():
    x = torch.tensor([[0.0, 1.0, 8.0, 9.0]])  # the ends are given up: 0.5 off each, not 0, 1, 1, 0
    stored = LeastSquaresQuantizer(1, "per_token", 4).quantize(x)
    assert (stored.scale.item(), stored.minimum.item(), stored.codes().tolist()) == (8.0, 0.5, [[0, 0, 1, 1]])
    assert LeastSquaresQuantizer(1, "per_token", 4).dequantize(stored).tolist() == [[0.5, 0.5, 8.5, 8.5]]


@given(st.sampled_from(AXES), st.integers(1, 8), st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
       st.sampled_from(FLOATS), st.sampled_from([1e-6, 1.0, 300.0]), st.integers(0, 999))
def test_no_group_is_worse_than_on_the_even_grid(axis, bits, scale_dtype, dtype, size, seed):
    x = (numbers(seed, T=16) * size).clamp(-3e4, 3e4).to(dtype)  # its range fits float16
    even, fitted = (q(bits, axis, G, scale_dtype=scale_dtype).quantize(x)
                    for q in (UniformQuantizer, LeastSquaresQuantizer))
    two_sums = 1 + 2 * G * np.finfo(np.float64).eps  # of the same squares, in numpy's order and in torch's
    assert (errors(fitted, x, axis) <= two_sums * errors(even, x, axis)).all()


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize(("scale_dtype", "numpy_dtype"), [(torch.float16, np.float16), (torch.float32, np.float32)])
def test_scale_and_minimum_are_the_regression_of_the_numbers_on_their_codes(axis, bits, scale_dtype, numpy_dtype):
    """A fixed point: the line through (code, number), rounded, and each number on the nearest level of that line."""
    x = torch.randn(1, 2, 32, 32, generator=torch.Generator().manual_seed(bits), dtype=torch.float64)
    even, stored = (q(bits, axis, G, scale_dtype=scale_dtype).quantize(x)
                    for q in (UniformQuantizer, LeastSquaresQuantizer))
    groups, (codes, scale, minimum) = rows(x, axis), read(stored, axis)
    nearest = np.rint((groups - minimum) / scale).clip(0, 2**bits - 1)
    assert (codes == nearest).all()
    changed = (scale != read(even, axis)[1])[:, 0] | (minimum != read(even, axis)[2])[:, 0]
    for code, x_i, s, m in zip(codes[changed], groups[changed], scale[changed, 0], minimum[changed, 0], strict=True):
        slope, start = np.polyfit(code, x_i, 1)
        tolerance = 1.01 * np.finfo(numpy_dtype).eps / 2
        assert abs(s - slope) <= tolerance * abs(slope) + 1e-12
        assert abs(m - start) <= tolerance * abs(start) + 1e-7  # 1e-7: float16 below its normal numbers
    assert changed.mean() > 0.95
    assert errors(stored, x, axis).sum() < (0.8, 0.8, 0.9, 0.95)[bits - 1] * errors(even, x, axis).sum()


def test_what_lies_on_the_even_grid_stays_there():
    x = torch.randint(0, 4, (1, 2, 8, G), generator=torch.Generator().manual_seed(0)) * 0.5 - 1.0
    x[..., 0], x[..., 1] = -1.0, 0.5  # both ends are there
    x[0, 0, 3] = 0.1  # a constant, and zeros
    x[0, 0, 4] = 0.0
    even, fitted = (q(2, "per_token", G).quantize(x) for q in (UniformQuantizer, LeastSquaresQuantizer))
    assert all(torch.equal(fitted.parts[name], even.parts[name]) for name in even.parts)


@pytest.mark.parametrize(("heads", "channels", "axis", "bits", "group", "said"), [
    (32, 128, "per_channel", 2, 32, 3.0), (32, 128, "per_token", 2, 128, 2.25), (3, 64, "per_token", 3, 64, 3.5)])
def test_bytes_are_those_of_the_even_grid(heads, channels, axis, bits, group, said):
    stored = LeastSquaresQuantizer(bits, axis, group).quantize(numbers(0, T=32, heads=heads, channels=channels))
    n = heads * 32 * channels
    assert stored.nbytes == n * bits // 8 + 4 * n // group and stored.bits_per_element == said


@given(st.sampled_from(AXES), st.integers(0, 3), st.integers(0, 9), st.integers(0, 99))
def test_how_a_sequence_is_cut_does_not_change_what_a_cache_stores(axis, sinks, residual, seed):
    q, k, v = tokens(40, batch=2, seed=seed)
    grid = LeastSquaresQuantizer(2, axis, 8)
    policy = CachePolicy(Side(grid, residual), Side(grid, residual), sinks)
    whole, pieces = new_cache(policy), new_cache(policy)
    run(whole, q, k, v, [40])
    run(pieces, q, k, v, cut(40, seed))
    assert bodies_equal(whole, pieces)
    n = (40 - sinks - residual) // grid.block * grid.block
    wanted = grid.quantize(v[..., sinks:sinks + n, :])
    assert all(torch.equal(part, wanted.parts[name]) for name, part in whole.values[0].body.parts.items())
    whole.crop(20)
    whole.reorder([1, 1])
    close(whole.read(0)[1], pieces.read(0)[1][[1, 1], :, :20])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("axis", AXES)
def test_every_dtype_comes_back_and_nothing_is_nothing(dtype, axis):
    quantizer, x = LeastSquaresQuantizer(8, axis, G), numbers(0, dtype)
    x_hat = quantizer.dequantize(quantizer.quantize(x))
    assert x_hat.dtype == dtype and x_hat.shape == x.shape and (x_hat - x).double().abs().max() < 0.5
    empty = quantizer.quantize(x[..., :0, :])
    assert quantizer.dequantize(empty).shape == (1, 2, 0, 32) and (empty.nbytes, empty.bits_per_element) == (0, 0.0)


@pytest.mark.parametrize(("call", "says"), [
    (lambda: LeastSquaresQuantizer(9), "n_bits"),
    (lambda: LeastSquaresQuantizer(2, "per_head"), "axis must be one of"),
    (lambda: LeastSquaresQuantizer(2, "per_token", 5).quantize(torch.ones(2, 8)), "8 is not a multiple of 5"),
    (lambda: LeastSquaresQuantizer(2, "per_token", 8).quantize(torch.full((2, 8), np.nan)), "16 of 16 are NaN"),
    (lambda: LeastSquaresQuantizer(2, "per_token", 8).quantize(torch.full((2, 8), 1e9)), "a wider scale_dtype")])
def test_mistakes_are_one_line(call, says):
    with pytest.raises(KvminiError, match=says) as error:
        call()
    assert "\n" not in str(error.value)
