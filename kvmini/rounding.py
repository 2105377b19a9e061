"""Rounding float64 to a narrower storage type: down, up, or to nearest.

A stored minimum that was rounded up, or a stored scale that was rounded down, leaves the ends of its
group outside the grid; that breaks the half-step bound. Torch only rounds to nearest (and from float64
to 16 bits it rounds twice), so the direction is mended here, one neighbour at a time.
Next file: `growing.py`.
"""

import math

import torch
from torch import Tensor


def round_down(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest value of `dtype` that is at most x (float64).

    Example:
        >>> round_down(torch.tensor([100.01], dtype=torch.float64), torch.float16).item()
        100.0
    """
    y = x.to(dtype)
    return torch.where(y.double() > x, torch.nextafter(y, torch.full_like(y, -math.inf)), y)


def round_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest value of `dtype` that is at least x (float64); never zero for x > 0.

    Example:
        >>> round_up(torch.tensor([1e-30], dtype=torch.float64), torch.float16).item()
        5.960464477539063e-08
    """
    y = x.to(dtype)
    return torch.where(y.double() < x, torch.nextafter(y, torch.full_like(y, math.inf)), y)


def round_nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The value of `dtype` nearest to x (float64), ties to even, rounded once."""
    low, high = round_down(x, dtype), round_up(x, dtype)
    middle = (low.double() + high.double()) / 2
    return torch.where(x < middle, low, torch.where(x > middle, high, x.to(dtype)))
