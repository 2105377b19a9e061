"""The from-scratch uniform quantizer: minimum, scale, round.

A group of numbers becomes integers on an even grid. Asymmetric (the default): the grid starts at the
group's minimum, kept as a float. Symmetric: the grid is centred on zero and needs no minimum.

The stored grid covers its group: the minimum is rounded down and the scale, computed from the stored
minimum, is rounded up. So no element is off by more than half a stored step. There is no epsilon: a
group of equal values has scale 0 and comes back as its minimum.

It does not choose levels from data (KVQuant) or rotate first (RotateKV). Next file: `rope.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvmini import axes
from kvmini.errors import KvminiError, count_of
from kvmini.packing import pack
from kvmini.quantizers.base import Quantizer, Stored, check_tensor
from kvmini.rounding import round_down, round_nearest, round_up

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class UniformQuantizer(Quantizer):
    """Uniform quantization of groups of `group_size` elements to `n_bits` (1 to 8).

    Shapes:
        x `[..., T, D]`; `stored.scale` (and `.minimum`) `[..., T, D/G]` per_token, `[..., T/G, D]`
        per_channel, `[B, 1]` per_tensor (which ignores group_size).
    Math:
        L = 2^n_bits - 1, scale = (max - min) / L, code = rint((x - min) / scale), x_hat = code * scale + min.
        symmetric: M = 2^(n_bits-1) - 1, scale = max|x| / M, code = rint(x / scale) + M, x_hat = (code - M) * scale.
    Raises:
        KvminiError for bits outside 1..8 (2..8 symmetric), an unknown axis, a group that does not divide,
        NaN or inf, or a scale or minimum past the largest finite value of `scale_dtype`.
    Source:
        KIVI (arXiv 2402.02750), section 3.1, with the rounding of scale and minimum made safe.
    Example:
        >>> x = torch.tensor([[0.0, 1.0, 2.0, 3.2]])
        >>> q = UniformQuantizer(n_bits=2, axis="per_token", group_size=4, scale_dtype=torch.float32)
        >>> stored = q.quantize(x)
        >>> stored.codes().tolist(), [round(v, 2) for v in q.dequantize(stored)[0].tolist()]
        ([[0, 1, 2, 3]], [0.0, 1.07, 2.13, 3.2])
    """

    n_bits: int = 2
    axis: str = "per_token"
    group_size: int = 32
    symmetric: bool = False
    scale_dtype: torch.dtype = torch.float16

    def __post_init__(self):
        if self.symmetric:
            count_of(self.n_bits, "symmetric n_bits", lowest=2, highest=8)
        count_of(self.n_bits, "n_bits", highest=8)
        axes.check(self.axis, self.group_size)
        if self.scale_dtype not in SCALE_DTYPES:
            raise KvminiError(f"scale_dtype must be one of {', '.join(map(str, SCALE_DTYPES))}, not {self.scale_dtype}")

    @property
    def block(self) -> int | None:
        return axes.block(self.axis, self.group_size)

    @property
    def levels(self) -> int:
        """Steps of the grid: codes are 0 .. levels."""
        return 2**self.n_bits - (2 if self.symmetric else 1)

    @property
    def zero_code(self) -> int:
        """The code about which x is rounded: M, which means 0.0, on a symmetric grid; else 0, the minimum."""
        return self.levels // 2 if self.symmetric else 0

    def quantize(self, x: Tensor) -> Stored:
        check_tensor(x)
        groups = axes.split(x.detach(), self.axis, self.group_size).to(self._arithmetic(x.dtype))
        parts = self._grid(groups)
        step, start = self._step_and_start(parts, groups.dtype)
        centre = start + self.zero_code * step
        codes = torch.where(step > 0, (groups - centre) / step, 0).round() + self.zero_code
        codes = axes.join(codes.to(torch.uint8), self.axis, x.shape)  # no clamp: the grid covers its group
        return Stored({"packed": pack(codes, self.n_bits), **parts}, tuple(x.shape), x.dtype, self.n_bits)

    def dequantize(self, stored: Stored) -> Tensor:
        dtype = self._arithmetic(stored.dtype)
        step, start = self._step_and_start(stored.parts, dtype)
        groups = axes.split(stored.codes(), self.axis, self.group_size).to(dtype)
        groups = torch.addcmul(start, groups, step)  # code (8 bits) * scale (11) is exact: rounds once, fused or not
        limit = torch.finfo(stored.dtype).max
        if limit < torch.finfo(dtype).max:
            groups = groups.clamp(-limit, limit)
        return axes.join(groups.to(stored.dtype), self.axis, stored.shape)

    def affine(self, stored: Stored) -> tuple[Tensor, Tensor, Tensor]:
        _, start = self._step_and_start(stored.parts, self._arithmetic(stored.dtype))
        return stored.parts["packed"], stored.scale, start[..., 0]

    def _grid(self, groups: Tensor) -> dict[str, Tensor]:
        """The scale (and, unless symmetric, the minimum) of each group, as stored."""
        low, high = groups.amin(-1).double(), groups.amax(-1).double()
        if self.symmetric:
            scale = torch.maximum(-low, high) / self.zero_code
            return {"scale": round_up(self._fits(scale, "scale"), self.scale_dtype)}
        self._fits(low, "minimum")
        constant = low == high
        minimum = torch.where(constant, round_nearest(low, self.scale_dtype), round_down(low, self.scale_dtype))
        scale = ((high - minimum.double()) / self.levels).clamp(min=5e-324)  # float64 itself may underflow
        scale = torch.where(constant, 0, scale)
        return {"scale": round_up(self._fits(scale, "scale"), self.scale_dtype), "minimum": minimum}

    def _step_and_start(self, parts: dict[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The stored scale, and the value of code 0, shaped to broadcast over the group (last dimension)."""
        step = parts["scale"].to(dtype)[..., None]
        return step, -self.zero_code * step if self.symmetric else parts["minimum"].to(dtype)[..., None]

    def _fits(self, value: Tensor, name: str) -> Tensor:
        limit = torch.finfo(self.scale_dtype).max
        if value.numel() and value.abs().max() > limit:
            raise KvminiError(f"a {name} of {value.abs().max().item():.6g} does not fit scale_dtype {self.scale_dtype} "
                              f"(largest {limit:.6g}): use a wider scale_dtype")
        return value

    def _arithmetic(self, dtype: torch.dtype) -> torch.dtype:
        # A float16 scale times a code cannot leave float32; a wider one can, so it works in float64.
        return torch.float32 if dtype != torch.float64 and self.scale_dtype == torch.float16 else torch.float64
