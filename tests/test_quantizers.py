"""The uniform quantizer: against its oracle, over the whole range of each type, and its structure."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import uniform

from kvmini import KvminiError, UniformQuantizer, axes
from kvmini.quantizers.base import FLOATS

AXES = ("per_token", "per_channel", "per_tensor")
KINDS = ("normal", "outlier channel", "large mean, small spread", "constant", "huge and tiny", "subnormal", "ties")


def tensor(kind, shape, dtype, seed):
    """A tensor of a kind that quantizers stumble over; every value fits `dtype` and float16 scales."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=random, dtype=torch.float64)
    if kind == "outlier channel":
        x[..., 0] *= 300
    elif kind == "large mean, small spread":
        x = 100 + x / 10
    elif kind == "constant":
        x = torch.full(shape, -2.7, dtype=torch.float64)
    elif kind == "huge and tiny":
        x *= 10.0 ** torch.randint(-7, 4, shape, generator=random)
    elif kind == "subnormal":
        x *= 1e-7
    elif kind == "ties":
        x = torch.randint(-8, 8, shape, generator=random) / 2.0
    return x.to(dtype)


def quantizers():
    """Every axis and bit width, groups of 8, both kinds of grid."""
    return st.builds(lambda n_bits, axis, symmetric: UniformQuantizer(max(n_bits, 1 + symmetric), axis, 8, symmetric),
                     st.integers(1, 8), st.sampled_from(AXES), st.booleans())


# --- the quantizer against its oracle

@given(st.sampled_from(KINDS), st.sampled_from(AXES), st.integers(1, 8), st.integers(0, 999))
def test_float64_agrees_with_the_oracle_to_the_last_bit(kind, axis, n_bits, seed):
    x = tensor(kind, (2, 3, 16, 24), torch.float64, seed)
    quantizer = UniformQuantizer(n_bits, axis, 8)
    stored = quantizer.quantize(x)
    codes, scale, minimum, x_hat = uniform(axes.split(x, axis, 8).numpy(), n_bits)
    assert np.array_equal(axes.split(stored.codes(), axis, 8).numpy(), codes)
    assert np.array_equal(stored.scale.double().numpy(), scale)
    assert np.array_equal(stored.minimum.double().numpy(), minimum)
    assert np.array_equal(axes.split(quantizer.dequantize(stored), axis, 8).numpy(), x_hat)


@given(st.sampled_from(AXES), st.integers(2, 8), st.integers(0, 999))
def test_symmetric_codes_are_rounded_about_zero(axis, n_bits, seed):
    x = tensor("ties", (2, 3, 16, 24), torch.float32, seed)
    stored = UniformQuantizer(n_bits, axis, 8, symmetric=True).quantize(x)
    groups, M = axes.split(x, axis, 8).double().numpy(), 2 ** (n_bits - 1) - 1
    scale = stored.scale.double().numpy()
    assert stored.minimum is None and (scale >= np.abs(groups).max(-1) / M).all()
    expected = np.rint(groups / np.where(scale > 0, scale, 1)[..., None]) + M
    assert np.array_equal(axes.split(stored.codes(), axis, 8).numpy(), expected)


# --- the whole range of each type

@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n_bits", [3, 8])
def test_no_grid_point_past_the_largest_value_becomes_infinite(dtype, n_bits):
    x = 2 * torch.rand(4000, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 1
    x[:, 0] = 1  # the top of a grid that covers may lie above its group
    x = (torch.finfo(dtype).max * x).to(dtype)
    quantizer = UniformQuantizer(n_bits, "per_token", 4, scale_dtype=torch.float32)
    assert torch.isfinite(quantizer.dequantize(quantizer.quantize(x))).all()


def test_the_scale_of_a_range_is_never_zero():
    x = torch.tensor([[0.0, 5e-324, 1e-323, 0.0]], dtype=torch.float64)
    assert UniformQuantizer(8, "per_token", 4).quantize(x).scale.item() > 0


def test_what_is_stored_holds_no_graph():
    stored = UniformQuantizer(2, "per_token", 8).quantize(torch.randn(2, 8, requires_grad=True))
    assert all(part.grad_fn is None and not part.requires_grad for part in stored.parts.values())


def test_past_the_largest_float16_is_an_error_even_where_rounding_would_hide_it():
    for row in ([65510.0, 65510.0], [-65510.0, 0.0]):
        with pytest.raises(KvminiError, match=r"minimum.*float16"):
            UniformQuantizer(8, "per_token", 2).quantize(torch.tensor([row]))
    with pytest.raises(KvminiError, match=r"scale.*float16"):
        UniformQuantizer(1, "per_token", 2).quantize(torch.tensor([[-65504.0, 65504.0]]))


# --- small inputs that broke other quantizers

def test_groups_of_equal_values_come_back():
    x = torch.tensor([[9.0, 9.0], [-9.0, -9.0]])
    quantizer = UniformQuantizer(8, "per_token", 2)
    assert torch.equal(quantizer.dequantize(quantizer.quantize(x)), x)


def test_groups_of_one_sign_keep_their_range():
    x = torch.arange(-22.0, -14.0)[None]
    quantizer = UniformQuantizer(8, "per_token", 8)
    assert (quantizer.dequantize(quantizer.quantize(x)) - x).abs().max() <= 0.0138


def test_small_scales_are_not_floored():
    x = torch.linspace(0, 0.02, 16, dtype=torch.bfloat16)[None]
    assert UniformQuantizer(4, "per_token", 16).quantize(x).codes().unique().numel() == 16


def test_a_nearly_constant_channel_stays_finite():
    x = torch.tensor([[0.5, 0.5 + 2**-11, 0.5 + 2**-10, 0.5]], dtype=torch.float16)
    quantizer = UniformQuantizer(8, "per_token", 4)
    assert (quantizer.dequantize(quantizer.quantize(x)) - x).abs().max() <= 2**-11


def test_exact_halves_go_to_the_even_code():
    x = torch.tensor([[0, 0.5, 1.5, 2.5, 3.5, 4.5, 12.5, 13.5, 14.5, 15]])
    codes = UniformQuantizer(4, "per_token", 10).quantize(x).codes()
    assert codes.tolist() == [[0, 0, 2, 2, 4, 4, 12, 14, 14, 15]]


@pytest.mark.parametrize("axis", AXES)
def test_memory_order_does_not_matter(axis):
    x = torch.arange(2.0 * 8 * 3 * 8).view(2, 8, 3, 8).transpose(1, 2)
    quantizer = UniformQuantizer(8, axis, 8)
    assert same(quantizer.quantize(x), quantizer.quantize(x.contiguous()))


@pytest.mark.parametrize("n_bits", [2, 3, 4, 8])
def test_quantizing_again_changes_no_code(n_bits):
    for x in (torch.arange(-8, 8).view(1, 16) * 0.1, torch.randn(4, 64, generator=torch.Generator().manual_seed(15))):
        quantizer = UniformQuantizer(n_bits, "per_token", 16)
        stored = quantizer.quantize(x)
        assert torch.equal(quantizer.quantize(quantizer.dequantize(stored)).codes(), stored.codes())


# --- structure

def same(a, b):
    return a.shape == b.shape and all(torch.equal(a.parts[name], b.parts[name]) for name in a.parts | b.parts)


@given(quantizers().filter(lambda quantizer: quantizer.block), st.integers(0, 3), st.integers(0, 3), st.integers(0, 99))
def test_quantizing_pieces_is_quantizing_the_whole(quantizer, blocks_a, blocks_b, seed):
    a, b = (tensor("outlier channel", (2, 3, 8 * n, 16), torch.float32, seed + i)
            for i, n in enumerate((blocks_a, blocks_b)))
    whole = quantizer.quantize(torch.cat([a, b], dim=-2))
    assert same(quantizer.cat(quantizer.quantize(a), quantizer.quantize(b)), whole)
    assert same(quantizer.take(whole, blocks=a.shape[-2] // quantizer.block), quantizer.quantize(a))
    rows = torch.tensor([1, 1, 0])
    assert same(quantizer.take(whole, rows=rows), quantizer.quantize(torch.cat([a, b], -2)[rows]))


def test_what_cannot_be_cut_or_joined_says_so():
    whole = UniformQuantizer(2, "per_tensor")
    stored = whole.quantize(torch.randn(2, 3, 8, 16))
    for cut in (lambda: whole.cat(stored, stored), lambda: whole.take(stored, blocks=1)):
        with pytest.raises(KvminiError, match="one piece"):
            cut()
    rows = UniformQuantizer(2, "per_token", 8)
    flat = rows.quantize(torch.randn(4, 16))
    with pytest.raises(KvminiError, match="batch rows"):
        rows.take(flat, rows=torch.tensor([0]))
    assert rows.take(flat, blocks=9).n_tokens == 4


@given(quantizers(), st.sampled_from(FLOATS))
def test_no_tokens_take_no_bytes(quantizer, dtype):
    assert quantizer.quantize(torch.empty(0, 3, 8, 16, dtype=dtype)).nbytes == 0
    stored = quantizer.quantize(torch.empty(2, 3, 0, 16, dtype=dtype))
    assert (stored.nbytes, stored.n_tokens, stored.bits_per_element) == (0, 0, 0.0)
    x_hat = quantizer.dequantize(stored)
    assert (x_hat.shape, x_hat.dtype) == ((2, 3, 0, 16), dtype)


@pytest.mark.parametrize(("n_bits", "axis", "group_size", "symmetric", "bits"), [
    (2, "per_token", 32, False, 3.0), (2, "per_channel", 32, False, 3.0), (4, "per_channel", 64, False, 4.5),
    (2, "per_token", 64, True, 2.25), (3, "per_token", 32, False, 4.0), (8, "per_channel", 128, True, 8.125)])
def test_bits_per_element_are_codes_plus_overheads(n_bits, axis, group_size, symmetric, bits):
    stored = UniformQuantizer(n_bits, axis, group_size, symmetric).quantize(torch.randn(1, 3, 128, 64))
    assert stored.bits_per_element == bits == 8 * stored.nbytes / (3 * 128 * 64)


def test_not_a_number_is_an_error_with_count_and_place():
    x = torch.zeros(1, 2, 4, 8)
    x[0, 1, 2, 3] = x[0, 1, 3, 0] = torch.nan
    with pytest.raises(KvminiError, match=r"2 of 64 .*\[0, 1, 2, 3\]"):
        UniformQuantizer(2, "per_token", 8).quantize(x)
    x[0, 1, 2, 3] = x[0, 1, 3, 0] = -torch.inf
    with pytest.raises(KvminiError, match=r"-inf"):
        UniformQuantizer(2, "per_tensor", 8).quantize(x)


@pytest.mark.parametrize(("settings", "says"), [
    *(({"n_bits": n}, r"^n_bits must be a whole number from 1 to 8") for n in (0, 9, "two", 2.0, True)),
    *(({"n_bits": n, "symmetric": True}, r"^symmetric n_bits must be a whole number from 2 to 8") for n in (1, 9)),
    *(({"group_size": n}, r"^group_size must be a whole number from 1 ") for n in (0, -1, 8.0)),
    ({"axis": "channel"}, r"per_token, per_channel, per_tensor.*'channel'"),
    ({"scale_dtype": torch.int8}, r"^scale_dtype must be one of torch.float16, .*not torch.int8")])
def test_bad_settings_are_refused_by_name(settings, says):
    with pytest.raises(KvminiError, match=says):
        UniformQuantizer(**settings)


@pytest.mark.parametrize(("dtype", "scale_dtype", "wanted"), [
    (torch.float16, torch.float16, torch.float32), (torch.float32, torch.float16, torch.float32),
    (torch.float64, torch.float16, torch.float64), (torch.float32, torch.bfloat16, torch.float64)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_affine_is_dequantize_in_the_quantizers_own_arithmetic(dtype, scale_dtype, wanted, symmetric):
    quantizer = UniformQuantizer(3, "per_token", 8, symmetric, scale_dtype)
    stored = quantizer.quantize(tensor("normal", (2, 5, 16), dtype, 0))
    packed, scale, start = quantizer.affine(stored)
    assert packed is stored.parts["packed"] and scale is stored.scale and start.dtype == wanted
    x_hat = axes.split(stored.codes(), "per_token", 8) * scale[..., None].to(wanted) + start[..., None]
    torch.testing.assert_close(axes.join(x_hat.to(dtype), "per_token", (2, 5, 16)), quantizer.dequantize(stored),
                               rtol=1e-3 if dtype == torch.float16 else 1e-6, atol=1e-6)


@pytest.mark.parametrize("x", [np.zeros((2, 32)), torch.zeros(2, 32, dtype=torch.int32), torch.zeros(32), None])
def test_only_floating_point_tensors_of_two_dimensions_or_more_are_taken(x):
    with pytest.raises(KvminiError, match="float16"):
        UniformQuantizer(2).quantize(x)
