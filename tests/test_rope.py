"""RoPE: the rotation, its inverse, far positions, long-context factors."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvmini import KvminiError, Rope
from kvmini.rope import llama3_factors

FAR = 2**20


def oracle(x, positions, base, factors=None):
    """Half-split RoPE as multiplication of complex numbers, angles in long double."""
    half = x.shape[-1] // 2
    theta = np.longdouble(base) ** (-np.arange(half, dtype=np.longdouble) / half)
    angle = np.asarray(positions, np.longdouble)[:, None] * (theta / (1 if factors is None else np.asarray(factors)))
    pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([pairs.real, pairs.imag], axis=-1).astype(np.float64)


@given(st.sampled_from([2, 8, 64, 80, 96]), st.sampled_from([10000.0, 100000.0, 500000.0]), st.integers(0, FAR),
       st.integers(0, 99))
def test_apply_is_the_rotation_of_pairs_at_any_position(head_dim, base, start, seed):
    x = torch.randn(2, 3, 5, head_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    positions = range(start, start + 5)
    expected = oracle(x.numpy(), list(positions), base)
    np.testing.assert_allclose(Rope(head_dim, base).apply(x, positions).numpy(), expected, rtol=0, atol=5e-9)
    # float32: one rounding of cos and sin, two products and a sum
    got = Rope(head_dim, base).apply(x.float(), positions).double().numpy()
    np.testing.assert_allclose(got, expected, rtol=0, atol=2.0**-22 * np.abs(x.numpy()).max() * 2)


def test_positions_may_be_a_tensor_in_any_order():
    x, rope = torch.randn(1, 1, 4, 8), Rope(8)
    shuffled = rope.apply(x[..., [2, 0, 3, 1], :], torch.tensor([2, 0, 3, 1]))
    assert torch.equal(shuffled, rope.apply(x, range(4))[..., [2, 0, 3, 1], :])


def test_llama3_factors_are_those_of_the_reference_formula():
    """Restated on inverse frequencies, as the reference does it: three cases by wavelength."""
    D, base, factor, low, high, original = 128, 500000.0, 8.0, 1.0, 4.0, 8192
    expected = []
    for frequency in base ** (-np.arange(0, D, 2) / D):
        wavelength = 2 * np.pi / frequency
        if wavelength < original / high:
            new = frequency
        elif wavelength > original / low:
            new = frequency / factor
        else:
            smooth = (original / wavelength - low) / (high - low)
            new = (1 - smooth) * frequency / factor + smooth * frequency
        expected.append(frequency / new)
    factors = llama3_factors(D, base, factor, low, high, original)
    np.testing.assert_allclose(factors, expected, rtol=1e-12)
    assert 1 < sorted(factors)[D // 4] < factor  # some pairs lie in between
    x = torch.randn(1, 1, 3, D, dtype=torch.float64)
    got = Rope(D, base, factors).apply(x, range(9000, 9003))
    np.testing.assert_allclose(got.numpy(), oracle(x.numpy(), range(9000, 9003), base, factors), rtol=0, atol=1e-9)


def test_mistakes_are_named():
    for make in (lambda: Rope(7), lambda: Rope(0), lambda: Rope(8, factors=(1.0,))):
        with pytest.raises(KvminiError):
            make()
    with pytest.raises(KvminiError, match="head_dim 8"):
        Rope(8).apply(torch.zeros(1, 1, 3, 16), range(3))
    with pytest.raises(KvminiError, match="2 positions"):
        Rope(8).apply(torch.zeros(1, 1, 3, 8), range(2))
