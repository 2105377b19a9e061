"""Change what a grid is given, and undo it: the shape that rotations, reorderings, factors and bases share.

A wrapper is a quantizer around a quantizer. The inner one decides how numbers are stored; this one decides
which numbers those are. Next file: `quantizers/rotated.py`.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvmini.errors import KvminiError
from kvmini.quantizers.base import Quantizer, Stored, check_tensor

INSIDE = dict.fromkeys(("L16", "L18", "L23", "L24"),
                       "codes, scale and minimum are the inner grid's, which is given other numbers")


@dataclass(frozen=True)
class WrappedQuantizer(Quantizer):
    """A quantizer around another one: whatever a subclass does not say is the inner one's.

    Parts of both stand in one `Stored` side by side, so a subclass gives its own parts other names.
    """

    inner: Quantizer

    @property
    def block(self) -> int | None:
        return self.inner.block

    @property
    def warm_up(self) -> int:
        return self.inner.warm_up

    def quantize(self, x: Tensor) -> Stored:
        return self.inner.quantize(x)

    def dequantize(self, stored: Stored) -> Tensor:
        return self.inner.dequantize(stored)

    def extend(self, body: Stored, x: Tensor) -> Stored:
        return self.inner.extend(body, x)

    def cat(self, a: Stored, b: Stored) -> Stored:
        return self.inner.cat(a, b)

    def take(self, stored: Stored, rows: Tensor | None = None, blocks: int | None = None) -> Stored:
        return self.inner.take(stored, rows, blocks)


@dataclass(frozen=True)
class TransformedQuantizer(WrappedQuantizer):
    """Stores `forward(x)`, and gives back `backward` of what was stored.

    Both work in float32 (float64 for float64), keep the shape, and treat every token alone, so all that the
    inner quantizer promises of blocks and batch rows stays true. What was stored remembers x's own dtype: a
    float16 result past the largest float16 number comes back as that number.

    Example:
        >>> class Halved(TransformedQuantizer):
        ...     def forward(self, x):
        ...         return x / 2
        ...     def backward(self, x):
        ...         return x * 2
        >>> from kvmini import UniformQuantizer
        >>> q = Halved(UniformQuantizer(2, "per_token", 4))
        >>> stored = q.quantize(torch.tensor([[0.0, 2.0, 4.0, 6.0]]))
        >>> stored.scale.item(), q.dequantize(stored).tolist()
        (1.0, [[0.0, 2.0, 4.0, 6.0]])
    """

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def backward(self, x: Tensor) -> Tensor: ...

    def quantize(self, x: Tensor) -> Stored:
        check_tensor(x)
        return replace(self.inner.quantize(self._given(x)), dtype=x.dtype)

    def dequantize(self, stored: Stored) -> Tensor:
        x = self.backward(self.inner.dequantize(replace(stored, dtype=wide_dtype(stored.dtype))))
        return narrow(x, stored.dtype)

    def extend(self, body: Stored, x: Tensor) -> Stored:
        check_tensor(x)
        body = replace(body, dtype=wide_dtype(x.dtype))
        return replace(self.inner.extend(body, self._given(x)), dtype=x.dtype)

    def _given(self, x: Tensor) -> Tensor:
        """What the inner quantizer is given for x."""
        y = self.forward(wide(x))
        if not torch.isfinite(y).all():
            raise KvminiError(f"numbers up to {x.abs().max().item():.6g} do not fit {y.dtype} once transformed")
        return y


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The arithmetic of wrappers: float32, float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def wide(x: Tensor) -> Tensor:
    return x.detach().to(wide_dtype(x.dtype))


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Back to the dtype of what was quantized, nothing past its largest number."""
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def merge(x: Tensor) -> Tensor:
    """All heads of a token beside each other: `[B, Hkv, T, D]` -> `[B, T, Hkv * D]` (`[T, D]` has one head)."""
    return x.movedim(-3, -2).flatten(-2) if x.ndim > 2 else x


def unmerge(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `merge`, for heads of `shape`.

    Example:
        >>> x = torch.randn(2, 3, 5, 4)
        >>> merge(x).shape, torch.equal(unmerge(merge(x), x.shape), x)
        (torch.Size([2, 5, 12]), True)
    """
    return x.unflatten(-1, (shape[-3], shape[-1])).movedim(-2, -3) if len(shape) > 2 else x
