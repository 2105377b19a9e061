"""Axes, packing and directed rounding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvmini import KvminiError, UniformQuantizer, axes
from kvmini.packing import pack
from kvmini.rounding import round_down, round_nearest, round_up

AXES = ("per_token", "per_channel", "per_tensor")


# --- axes and packing

@pytest.mark.parametrize("axis", AXES)
def test_join_undoes_split_for_any_leading_shape_and_stride(axis):
    for shape in ((8, 16), (3, 8, 16), (2, 3, 8, 16), (2, 1, 3, 24, 8)):
        x = torch.randn(shape)
        for y in (x, x.transpose(-1, -2).contiguous().transpose(-1, -2), x.flip(0)[::1]):
            groups = axes.split(y, axis, 8)
            assert torch.equal(axes.join(groups, axis, y.shape), y)


def test_groups_hold_neighbours_along_their_axis():
    x = torch.arange(2 * 4 * 6).view(2, 4, 6)  # row 0 holds tokens 0..3 of channels 0..5
    assert axes.split(x, "per_token", 3)[0, 1].tolist() == [[6, 7, 8], [9, 10, 11]]
    assert axes.split(x, "per_channel", 2)[0, 1, 5].tolist() == [17, 23]
    assert axes.split(x, "per_tensor", 2).shape == (2, 1, 24)


@pytest.mark.parametrize(("axis", "size"), [("per_token", 96), ("per_channel", 33)])
def test_a_group_that_does_not_divide_names_both_numbers(axis, size):
    x = torch.zeros(1, 2, 33, 96)
    with pytest.raises(KvminiError, match=f"{size}.*64"):
        UniformQuantizer(4, axis, 64).quantize(x)


@given(st.integers(1, 8), st.lists(st.integers(0, 255), min_size=1, max_size=20))
def test_packed_bytes_are_the_little_endian_stream_of_codes(n_bits, values):
    codes = [value % 2**n_bits for value in values]
    stream = sum(code << n_bits * i for i, code in enumerate(codes))
    packed = pack(torch.tensor(codes, dtype=torch.uint8), n_bits)
    assert bytes(packed.tolist()) == stream.to_bytes(-(-n_bits * len(codes) // 8), "little")


# --- rounding

@given(st.floats(-60000, 60000), st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
def test_directed_rounding_is_the_nearest_value_on_its_side(value, dtype):
    x = torch.tensor([value], dtype=torch.float64)
    low, high, near = (f(x, dtype).double() for f in (round_down, round_up, round_nearest))
    assert low <= x <= high
    assert torch.nextafter(low.to(dtype), torch.tensor([torch.inf], dtype=dtype)).double() >= high
    assert (near - x).abs() == torch.minimum(x - low, high - x)


def test_halves_between_two_values_go_to_the_even_one():
    x = torch.tensor([1 + 2**-11, 1 + 3 * 2**-11, -1 - 2**-11, 3 * 2.0**-25], dtype=torch.float64)
    assert round_nearest(x, torch.float16).tolist() == [1, 1 + 2**-9, -1, 2.0**-23]


def test_float64_is_rounded_once_to_16_bits():
    just_over_half = torch.tensor([1 + 2**-11 + 2**-40], dtype=torch.float64)
    assert round_nearest(just_over_half, torch.float16).item() == 1 + 2**-10  # through float32 it would be 1
