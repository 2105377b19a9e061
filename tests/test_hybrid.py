"""InnerQ's hybrid grid: each group on the better of two, against numpy."""

import numpy as np
import oracle
import pytest
import torch
from cache_inputs import HKV, D, comes_back, tokens
from hypothesis import given
from hypothesis import strategies as st
from test_normalized import symmetric
from test_remat import close

from kvmini import KvminiError
from kvmini.quantizers.base import FLOATS
from kvmini.quantizers.hybrid import HybridQuantizer


def better_of_two(x, bits):
    """On groups along the last axis: (whether asymmetric, the two sums of |error|, x_hat)."""
    both = symmetric(x, bits)[1], oracle.uniform(x, bits - 1)[3]
    off = [np.abs(x_hat - x).sum(-1) for x_hat in both]
    return off[1] < off[0], off, np.where((off[1] < off[0])[..., None], both[1], both[0])


@given(st.sampled_from(["per_token", "per_channel"]), st.integers(2, 5), st.sampled_from([0.0, 0.5, 2.0]),
       st.integers(0, 999))
def test_each_group_is_on_the_grid_that_fits_it_better(axis, bits, shift, seed):
    x = tokens(32, seed=seed)[1] + shift * torch.randn(1, HKV, 1, D, generator=torch.Generator().manual_seed(seed))
    quantizer, turned = HybridQuantizer(bits, axis, 8), x if axis == "per_token" else x.mT
    groups = turned.numpy().reshape(*turned.shape[:-1], -1, 8)
    asymmetric, _, x_hat = better_of_two(groups, bits)
    stored = quantizer.quantize(x)
    wanted = torch.from_numpy(x_hat.reshape(turned.shape))
    close(quantizer.dequantize(stored), wanted if axis == "per_token" else wanted.mT, 1e-12)
    asymmetric = asymmetric if axis == "per_token" else asymmetric.swapaxes(-1, -2)
    bits_of = np.unpackbits(stored.parts["mask"].numpy(), axis=-1, count=asymmetric.shape[-1], bitorder="little")
    assert (bits_of == asymmetric).all() and (stored.minimum.numpy()[~asymmetric] == 0).all()


def test_both_grids_are_used_and_a_tie_is_symmetric():
    x = torch.tensor([[-1.0, 0, 1, 0], [5, 6, 5, 6], [0, 0, 0, 0], [0, 4, 0, 4]])  # the last two: no error either way
    stored = HybridQuantizer(2, "per_token", 4).quantize(x)
    assert stored.parts["mask"].tolist() == [[0], [1], [0], [0]]
    assert stored.minimum.tolist() == [[0], [5], [0], [0]] and stored.scale.tolist() == [[1], [1], [0], [4]]
    assert stored.codes().tolist() == [[0, 1, 2, 1], [0, 1, 0, 1], [1, 1, 1, 1], [1, 2, 1, 2]]


def test_which_grid_fits_better_does_not_hang_on_how_numbers_lie_in_memory():
    """Grids of steps 14 and 15 whose errors are the same numbers in another order; their float sums are rounded."""
    t = torch.rand(62, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ends = torch.tensor([-15.0, 210.0, 14.0, 0.0], dtype=torch.float64)[:, None].expand(4, 64)
    x = torch.cat([14 + t, 15 - t, ends])
    per_channel = HybridQuantizer(5, "per_channel", 128).quantize(x)
    per_token = HybridQuantizer(5, "per_token", 128).quantize(x.T.contiguous())
    assert torch.equal(per_channel.codes(), per_token.codes().T)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("axis", ["per_token", "per_channel"])
def test_every_dtype_comes_back_and_nothing_is_nothing(axis, dtype):
    comes_back(HybridQuantizer(8, axis, 8), dtype)


@pytest.mark.parametrize(("call", "says"), [
    (lambda: HybridQuantizer(1), "hybrid n_bits"),
    (lambda: HybridQuantizer(2, "per_head"), "axis must be one of"),
    (lambda: HybridQuantizer(2, "per_channel", 8).quantize(torch.ones(1, 9, 4)), "9 is not a multiple of 8"),
    (lambda: HybridQuantizer(2, "per_channel", 8).quantize(torch.full((1, 8, 4), np.nan)), "32 of 32 are NaN")])
def test_mistakes_are_one_line(call, says):
    with pytest.raises(KvminiError, match=says) as error:
        call()
    assert "\n" not in str(error.value)
