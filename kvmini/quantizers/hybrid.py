"""InnerQ's hybrid grid: each group is symmetric or asymmetric, whichever fits it better.

Symmetric uses all b bits, one of them for the sign; asymmetric gives the sign bit up and gets a minimum.
Next file: `quantizers/least_squares.py`.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from kvmini import axes
from kvmini.errors import count_of
from kvmini.packing import pack, unpack
from kvmini.quantizers.base import Quantizer, Stored, check_tensor
from kvmini.quantizers.transformed import narrow, wide_dtype
from kvmini.quantizers.uniform import UniformQuantizer


@dataclass(frozen=True)
class HybridQuantizer(Quantizer):
    """Per group the better of symmetric with `n_bits` and asymmetric with one bit fewer, by the sum of |error|.

    A tie is symmetric. Every group stores a scale, a minimum (0 where symmetric) and one bit that says which.

    Shapes:
        x `[..., T, D]`; scale, minimum as in `UniformQuantizer`; mask: a bit per group, packed along the last
        dimension, so D * G per_channel elements take n_bits + 33/G bits each
    Source:
        InnerQ (arXiv 2602.23200), its released code.
    Example:
        >>> q = HybridQuantizer(2, "per_token", 4)
        >>> q.dequantize(q.quantize(torch.tensor([[-1.0, 0.0, 1.0, 0.0], [5.0, 6.0, 5.0, 6.0]]))).tolist()
        [[-1.0, 0.0, 1.0, 0.0], [5.0, 6.0, 5.0, 6.0]]
    """

    does_not_promise: ClassVar[dict[str, str]] = {
        "L04": "a constant group may be better off symmetric", "L06": "what was rounded may prefer the other grid",
        "L09": "a shifted group may prefer the other grid", "L11": "the two grids are not nested",
        "L16": "a symmetric group shows a minimum of 0, not that of its codes",
        "L23": "a symmetric grid must hold 0", "L24": "a group may prefer the other grid"}

    n_bits: int = 2
    axis: str = "per_channel"
    group_size: int = 32

    def __post_init__(self):
        count_of(self.n_bits, "hybrid n_bits", lowest=2, highest=8)
        axes.check(self.axis, self.group_size)

    @cached_property
    def grids(self) -> tuple[UniformQuantizer, UniformQuantizer]:
        """Symmetric, asymmetric."""
        return (UniformQuantizer(self.n_bits, self.axis, self.group_size, symmetric=True),
                UniformQuantizer(self.n_bits - 1, self.axis, self.group_size))

    @property
    def block(self) -> int | None:
        return axes.block(self.axis, self.group_size)

    def quantize(self, x: Tensor) -> Stored:
        check_tensor(x)
        x = x.detach()
        symmetric, asymmetric = (grid.quantize(x) for grid in self.grids)
        off = [(self._split(grid.dequantize(stored)).double() - self._split(x).double()).abs().contiguous().sum(-1)
               for grid, stored in zip(self.grids, (symmetric, asymmetric), strict=True)]
        mask = off[1] < off[0]  # the asymmetric ones, [..., groups]; contiguous: a sum's order must not hang on strides
        codes = torch.where(mask[..., None], self._split(asymmetric.codes()), self._split(symmetric.codes()))
        parts = {"packed": pack(axes.join(codes, self.axis, x.shape), self.n_bits),
                 "scale": torch.where(mask, asymmetric.scale, symmetric.scale),
                 "minimum": torch.where(mask, asymmetric.minimum, 0), "mask": pack(mask.to(torch.uint8), 1)}
        return Stored(parts, tuple(x.shape), x.dtype, self.n_bits)

    def dequantize(self, stored: Stored) -> Tensor:
        dtype = wide_dtype(stored.dtype)
        scale, minimum = stored.scale.to(dtype), stored.minimum.to(dtype)
        mask = unpack(stored.parts["mask"], 1, scale.shape[-1]).bool()
        start = torch.where(mask, minimum, -self.grids[0].zero_code * scale)
        x = torch.addcmul(start[..., None], self._split(stored.codes()).to(dtype), scale[..., None])
        return narrow(axes.join(x, self.axis, stored.shape), stored.dtype)

    def _split(self, x: Tensor) -> Tensor:
        return axes.split(x, self.axis, self.group_size)
