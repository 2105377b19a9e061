"""Inputs: keys and values as they are, and as they are when they break a quantizer.

`kv_tensors` is a hypothesis strategy for anybody's tests: ragged shapes, every floating-point type, and the
kinds below. Its "any" kind is drawn number by number, over the whole range, so its counterexamples shrink to a
few round numbers; the other kinds have a structure and are drawn by a seed. Next file: `cases.py`.
"""

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from kvmini.quantizers.base import FLOATS


def _normal(random, shape, largest):
    return random.standard_normal(shape)


def _outlier_channel(random, shape, largest):
    """One channel a hundred times the others, in every token, as in real keys."""
    x = random.standard_normal(shape)
    x[..., random.integers(shape[-1])] *= 100
    return x


def _sink_token(random, shape, largest):
    """The first token's vector is short, as in real values."""
    x = random.standard_normal(shape)
    x[..., :1, :] *= 0.03
    return x


def _large_mean(random, shape, largest):
    return min(largest / 2, random.choice([7.7, 100.0, 3000.0])) * (1 + random.standard_normal(shape) * 1e-3)


def _ties(random, shape, largest):
    return random.integers(-16, 17, shape) / 2


def _constant(random, shape, largest):
    """Equal numbers along tokens, along channels, or everywhere."""
    x = random.choice([1.0, -2.7, 0.1, 1000.3, 1e-6, 0.0]) * np.ones(shape)
    return x * random.standard_normal([(1, shape[-1]), (shape[-2], 1), (1, 1)][random.integers(3)])


def _huge_and_tiny(random, shape, largest):
    return random.standard_normal(shape) * 10.0 ** random.uniform(-8, np.log10(largest) - 1, shape)


def _subnormal(random, shape, largest):
    return random.standard_normal(shape) * random.choice([2.0**-14, 2.0**-24, 2.0**-126, 2.0**-148])


def _extremes(random, shape, largest):
    return random.choice([-1.0, -0.5, -1e-7, 0.0, 1e-7, 1 / 3, 1.0], shape) * largest


@np.errstate(over="ignore")  # what overflows is clipped
def _rounded(x, digits):
    """x to so many decimal digits."""
    unit = 10.0 ** (np.floor(np.log10(np.abs(x), where=x != 0, out=np.zeros(x.shape))) - (digits - 1))
    return np.where(unit > 0, np.round(x / np.where(unit > 0, unit, 1)) * unit, x) if digits < 17 else x


KINDS = {"normal": _normal, "outlier channel": _outlier_channel, "sink token": _sink_token, "large mean": _large_mean,
         "ties": _ties, "constant": _constant, "huge and tiny": _huge_and_tiny, "subnormal": _subnormal,
         "extremes": _extremes}
ALL_KINDS = ("any", *KINDS)


@st.composite
def kv_tensors(draw, dtypes: Sequence[torch.dtype] = FLOATS, kinds: Sequence[str] = ALL_KINDS, tokens: int = 1,
               channels: int = 1, largest: float = 2.0**14) -> Tensor:
    """Tensors `[B, Hkv, T, D]`, T a multiple of `tokens`, D of `channels`, no magnitude above `largest`.

    Example:
        >>> from hypothesis import given
        >>> @given(kv_tensors(dtypes=[torch.float16], tokens=32))
        ... def test(x):
        ...     assert x.shape[-2] % 32 == 0 and x.isfinite().all()
        >>> test()
    """
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 2)), tokens * draw(multiples(tokens)),
             channels * draw(multiples(channels)))
    dtype = draw(st.sampled_from(list(dtypes)))
    largest = min(largest, torch.finfo(dtype).max)
    kind = draw(st.sampled_from(list(kinds)))
    if kind == "any":
        width = {torch.float16: 16, torch.float64: 64}.get(dtype, 32)
        end = float(np.dtype(f"float{width}").type(largest))  # a bfloat16 is a float32 too
        x = draw(hnp.arrays(f"float{width}", shape, elements=st.floats(-end, end, width=width)))
    else:
        random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        digits = draw(st.sampled_from([1, 2, 17, 17]))  # counterexamples shrink to numbers of one digit
        x = np.clip(_rounded(KINDS[kind](random, shape, largest), digits), -largest, largest)
    return torch.from_numpy(x.astype(np.float64)).clamp(-largest, largest).to(dtype)


def multiples(of: int):
    """How many units of a length: few where the unit is large already."""
    return st.integers(1, 3 if of > 1 else 7)
