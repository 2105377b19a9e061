"""RotateKV against matrices and an oracle: rotated, sorted, clipped, in groups of a token."""

import numpy as np
import oracle
import pytest
import torch
from cache_inputs import HKV, PREFILLS, D, H, bodies_equal, cut, new_cache, tokens
from hypothesis import given
from hypothesis import strategies as st
from test_model import small
from test_remat import close, ids_of, logits

from kvmini import CachePolicy, KvminiError, Side, UniformQuantizer
from kvmini.quantizers.base import FLOATS
from kvmini.quantizers.exact import ExactQuantizer
from kvmini.quantizers.rotated import ClippedQuantizer, HadamardQuantizer, ReorderedQuantizer, channel_order, fwht


def sylvester(n):
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    return matrix / np.sqrt(n)


def shuffled(n, seed=0):
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


def outliers(T, heads=2, seed=0, channels=32):
    """`[1, heads, T, D]`, each head with a large channel of its own, of one sign."""
    x = torch.randn(1, heads, T, channels, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for head in range(heads):
        x[:, head, :, 3 + 5 * head] += 12 * (head + 1)
    return x


@pytest.mark.parametrize("n", [1, 2, 8, 64, 128])
def test_the_fast_transform_is_the_matrix_and_its_own_inverse(n):
    x = torch.randn(2, 3, n, dtype=torch.float64)
    close(fwht(x), torch.from_numpy(x.numpy() @ sylvester(n)), 1e-12)
    close(fwht(fwht(x)), x, 1e-12)


def test_keys_are_rotated_sorted_clipped_and_quantized_as_in_numpy():
    calibration, x = outliers(50, seed=1), outliers(9)
    q = HadamardQuantizer(None)
    order = channel_order(q.forward(calibration[0]))
    grid = UniformQuantizer(2, "per_token", 16)
    quantizer = HadamardQuantizer(ReorderedQuantizer(ClippedQuantizer(grid), order))
    channels = lambda t: t[0].numpy().transpose(1, 0, 2).reshape(-1, 64)  # noqa: E731
    both = np.kron(np.eye(2), sylvester(32))
    wanted_order = np.argsort((channels(calibration) @ both).sum(0))
    assert order.tolist() == wanted_order.tolist()
    rotated = (channels(x) @ both)[:, wanted_order].reshape(9, 4, 16)
    low, high = rotated.min(-1, keepdims=True), rotated.max(-1, keepdims=True)
    middle, half = (high + low) / 2, 0.8 * (high - low) / 2
    stored = oracle.uniform(rotated.clip(middle - half, middle + half), 2)[3].reshape(9, 64)
    back = (stored[:, np.argsort(wanted_order)] @ both).reshape(9, 2, 32).transpose(1, 0, 2)
    close(quantizer.dequantize(quantizer.quantize(x))[0], torch.from_numpy(back), 1e-9)


def test_two_heads_rotated_together_are_one_of_twice_the_channels():
    x = outliers(5, heads=4)
    quantizer = HadamardQuantizer(UniformQuantizer(2, "per_token", 32), heads=2)
    pairs = x[0].numpy().reshape(2, 2, 5, 32).transpose(0, 2, 1, 3).reshape(2, 5, 64) @ sylvester(64)
    stored = oracle.uniform(pairs.reshape(2, 5, 2, 32), 2)[3].reshape(2, 5, 64)
    for got, wanted in ((quantizer.forward(x), pairs),
                        (quantizer.dequantize(quantizer.quantize(x)), stored @ sylvester(64))):
        close(got[0], torch.from_numpy(wanted.reshape(2, 5, 2, 32).transpose(0, 2, 1, 3).reshape(4, 5, 32)))
    close(quantizer.backward(quantizer.forward(x)), x)
    for read in (quantizer.map_query, quantizer.map_output):
        with pytest.raises(KvminiError, match="can only be read through dequantize"):
            read(x, None)


def test_a_rotation_keeps_the_size_of_errors():
    """What is lost of the rotated numbers is lost of the numbers, though elsewhere."""
    x, grid = outliers(20), UniformQuantizer(2, "per_token", 16)
    rotated, quantizer = fwht(x), HadamardQuantizer(grid)
    lost, of_rotated = (q.dequantize(q.quantize(y)) - y for q, y in ((quantizer, x), (grid, rotated)))
    close(lost.norm(dim=-1), of_rotated.norm(dim=-1))
    assert not torch.allclose(lost, of_rotated)


@pytest.mark.parametrize("axis", ["per_token", "per_channel"])
def test_a_range_is_clipped_about_its_middle_whatever_its_sign(axis):
    """10 .. 11 becomes 10.1 .. 10.9; the released code, which multiplies the ends, would make it 8 .. 8.8."""
    x = torch.tensor([[10.0, 10.3, 10.6, 11.0], [-1.0, 0.0, 0.2, 4.0], [3.0, 3.0, 3.0, 3.0], [-9.0, -6.0, -5.0, 1.0]])
    wanted = [[10.1, 10.3, 10.6, 10.9], [-0.5, 0.0, 0.2, 3.5], [3.0, 3.0, 3.0, 3.0], [-8.0, -6.0, -5.0, 0.0]]
    x, wanted = (torch.as_tensor(t) if axis == "per_token" else torch.as_tensor(t).mT for t in (x, wanted))
    grid = UniformQuantizer(8, axis, 4)
    close(ClippedQuantizer(grid).forward(x), wanted, 1e-6)
    assert torch.equal(ClippedQuantizer(grid, ratio=1.0).forward(x), x)
    close(ClippedQuantizer(grid).dequantize(ClippedQuantizer(grid).quantize(x)), wanted, 0.02)


@pytest.mark.parametrize("prefill", PREFILLS)
@pytest.mark.parametrize(("wrap", "pre_rope"), [
    (HadamardQuantizer, True), (HadamardQuantizer, False), (lambda inner: HadamardQuantizer(inner, heads=2), True),
    (lambda inner: HadamardQuantizer(ReorderedQuantizer(inner, shuffled(HKV * D))), True),
    (lambda inner: ReorderedQuantizer(HadamardQuantizer(inner), shuffled(HKV * D)), True)])
def test_around_exact_storage_the_logits_are_those_of_the_exact_cache(wrap, pre_rope, prefill):
    model, ids, side = small(), ids_of(24), Side(wrap(ExactQuantizer()), residual_length=5)
    expected = model(ids).detach()
    for sizes in ([24], [9, 12, 1, 1, 1]):
        cache = model.new_cache(CachePolicy(side, side, sinks=2, pre_rope=pre_rope, prefill=prefill))
        close(logits(model, ids, cache, sizes), expected, 1e-9)
        assert {store.body.n_tokens for store in cache.stores()} == {17}


def test_a_rotated_query_reads_rotated_keys_and_outputs_are_rotated_back():
    q, k, v = tokens(9)
    grid = UniformQuantizer(3, "per_token", D)
    quantizer = HadamardQuantizer(grid)
    stored, shared = quantizer.quantize(k), lambda x: x.repeat_interleave(H // HKV, dim=1)
    scores = quantizer.map_query(q, stored) @ shared(grid.dequantize(stored)).mT
    close(scores, q @ shared(quantizer.dequantize(stored)).mT)
    stored, weights = quantizer.quantize(v), torch.rand(1, H, 4, 9, dtype=torch.float64)
    out = quantizer.map_output(weights @ shared(grid.dequantize(stored)), stored)
    close(out, weights @ shared(quantizer.dequantize(stored)))


@pytest.mark.parametrize(("heads", "channels", "bits", "group", "said"), [
    (32, 128, 2, 128, 2.25), (3, 64, 2, 64, 2.5), (3, 64, 4, 64, 4.5)])
def test_bytes_are_codes_and_two_float16_numbers_a_group(heads, channels, bits, group, said):
    x = torch.randn(1, heads, 4, channels)
    grid = ClippedQuantizer(UniformQuantizer(bits, "per_token", group))
    stored = HadamardQuantizer(ReorderedQuantizer(grid, shuffled(heads * channels))).quantize(x)
    assert stored.nbytes == x.numel() * bits // 8 + 4 * x.numel() // group and stored.bits_per_element == said


def test_sorting_adapts_one_rotation_to_heads_that_differ():
    """Heads with an outlier channel each: rotated alike, every channel of a head has a mean of its own size."""
    calibration, x = outliers(100, heads=3, seed=1), outliers(40, heads=3)
    grid = UniformQuantizer(2, "per_token", 16)
    alike = HadamardQuantizer(grid)
    order = channel_order(alike.forward(calibration[0]))
    errors = {name: (q.dequantize(q.quantize(x)) - x).norm().item() for name, q in {
        "plain": grid, "alike": alike, "sorted": HadamardQuantizer(ReorderedQuantizer(grid, order))}.items()}
    assert errors["sorted"] < 0.8 * errors["alike"] and errors["alike"] < errors["plain"]


@given(st.integers(0, 3), st.integers(0, 9), st.integers(0, 99))
def test_how_a_sequence_is_cut_does_not_change_what_a_cache_stores(sinks, residual, seed):
    _, k, v = tokens(40, batch=2, seed=seed)
    grid = ClippedQuantizer(UniformQuantizer(2, "per_token", 8))
    keys = HadamardQuantizer(ReorderedQuantizer(grid, shuffled(HKV * D, seed)))
    policy = CachePolicy(Side(keys, residual), Side(HadamardQuantizer(grid), residual), sinks, pre_rope=True)
    whole, pieces = new_cache(policy), new_cache(policy)
    for cache, sizes in ((whole, [40]), (pieces, cut(40, seed))):
        for part in zip(k.split(sizes, dim=-2), v.split(sizes, dim=-2), strict=True):
            cache.append(0, *part)
    assert bodies_equal(whole, pieces)
    pieces.crop(20)
    pieces.reorder([1])
    close(pieces.read(0)[1], whole.read(0)[1][1:, :, :20])


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_dtype_comes_back_and_nothing_is_nothing(dtype):
    quantizer = HadamardQuantizer(ReorderedQuantizer(UniformQuantizer(8, "per_token", 32), torch.arange(64).flip(0)))
    x = outliers(6).to(dtype)
    x_hat = quantizer.dequantize(quantizer.quantize(x))
    assert x_hat.dtype == dtype and (x_hat - x).double().abs().max() < 0.4
    empty = quantizer.quantize(x[..., :0, :])
    assert quantizer.dequantize(empty).shape == (1, 2, 0, 32) and empty.nbytes == 0


def test_what_comes_back_past_the_largest_number_of_its_type_is_that_number():
    most = torch.finfo(torch.float16).max
    x = torch.zeros(1, 8, dtype=torch.float16)
    x[0, 3] = -most  # rotated, eight times the same size, whose float16 step is rounded up
    x_hat = HadamardQuantizer(UniformQuantizer(1, "per_token", 8)).quantize(x)
    assert HadamardQuantizer(UniformQuantizer(1, "per_token", 8)).dequantize(x_hat)[0, 3] == -most


@pytest.mark.parametrize(("call", "says"), [
    (lambda: fwht(torch.ones(2, 12)), "power of two of channels, not 12"),
    (lambda: HadamardQuantizer(None, heads=3).forward(torch.ones(1, 6, 4, 8)), "power of two of channels, not 24"),
    (lambda: HadamardQuantizer(None, heads=2).forward(torch.ones(4, 8)), "1 heads cannot be rotated 2 at a time"),
    (lambda: HadamardQuantizer(None, heads=2).forward(torch.ones(1, 3, 4, 8)), "3 heads cannot be rotated 2"),
    (lambda: HadamardQuantizer(None, heads=0), "heads"),
    (lambda: ReorderedQuantizer(None, torch.arange(9)).forward(torch.ones(1, 2, 4, 8)), "9 channels does not fit 16"),
    (lambda: HadamardQuantizer(UniformQuantizer(2, "per_token", 4)).quantize(torch.full((1, 4), 3e38)), "transf")])
def test_mistakes_are_one_line(call, says):
    with pytest.raises(KvminiError, match=says) as error:
        call()
    assert "\n" not in str(error.value)
