"""The one interface: what every quantizer promises to a cache, and what it leaves behind.

A quantizer decides how a block of numbers is stored. It knows nothing of time: when a block is handed
to it is the cache's business (`store.py`). Next file: `quantizers/uniform.py`, the first real one.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvmini.errors import KvminiError
from kvmini.growing import append
from kvmini.packing import unpack

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Stored:
    """What one call to `quantize` leaves behind: tensors, and what is needed to read them.

    Shapes:
        every part is `[..., n, m]`, its second last dimension running along the tokens (n is T, or T/G);
        `packed` is uint8 `[..., T, ceil(D * n_bits / 8)]`.
    Example:
        >>> from kvmini import UniformQuantizer
        >>> stored = UniformQuantizer(2, "per_channel", 32).quantize(torch.randn(1, 3, 64, 16))
        >>> stored.bits_per_element, tuple(stored.scale.shape), stored.codes().shape[-2:]
        (3.0, (1, 3, 2, 16), torch.Size([64, 16]))
    """

    parts: dict[str, Tensor]
    shape: tuple[int, ...]  # of the tensor that was quantized, [..., T, D]
    dtype: torch.dtype  # of the tensor that was quantized
    n_bits: int

    @property
    def n_tokens(self) -> int:
        return self.shape[-2]

    @property
    def n_elements(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def bits_per_element(self) -> float:
        """All stored bits, overheads included, over the elements; 0.0 for no elements."""
        return 8 * self.nbytes / self.n_elements if self.n_elements else 0.0

    @property
    def scale(self) -> Tensor | None:
        """The stored scale of each group; None where there is none."""
        return self.parts.get("scale")

    @property
    def minimum(self) -> Tensor | None:
        """The stored minimum of each group; None where the grid is symmetric."""
        return self.parts.get("minimum")

    def codes(self) -> Tensor:
        """The integer codes, uint8 `[..., T, D]`."""
        return unpack(self.parts["packed"], self.n_bits, self.shape[-1])


class Quantizer(ABC):
    """Abstract base of all quantizers; yours may subclass it too.

    A quantizer has no memory: the same block gives the same `Stored`, whatever came before, and
    `quantize(cat(a, b))` is `cat(quantize(a), quantize(b))` where a and b are whole blocks. What a method must
    remember of a sequence it leaves in that sequence's `Stored`, and `extend` finds it there.

    Shapes:
        `quantize` takes `[..., T, D]`, T a multiple of `block` (0 too); a cache gives it `[B, Hkv, T, D]`.
    Example:
        >>> class Half(Quantizer):
        ...     def quantize(self, x):
        ...         return Stored({"half": x.half()}, tuple(x.shape), x.dtype, n_bits=16)
        ...     def dequantize(self, stored):
        ...         return stored.parts["half"].to(stored.dtype)
        >>> Half().quantize(torch.randn(1, 2, 5, 8)).bits_per_element
        16.0
    """

    block: int | None = 1  # tokens it must be given at once; None: no part of a sequence stands alone
    warm_up: int = 0  # tokens that a cache hands over at first, at least: some methods measure them
    does_not_promise: ClassVar[dict[str, str]] = {}  # law -> reason, for the methods that trade a law away

    @abstractmethod
    def quantize(self, x: Tensor) -> Stored: ...

    @abstractmethod
    def dequantize(self, stored: Stored) -> Tensor:
        """The tensor again, in its own shape, dtype and device."""

    def extend(self, body: Stored, x: Tensor) -> Stored:
        """The body with tokens handed over to it; a cache calls this, never `quantize` alone."""
        return self.cat(body, self.quantize(x))

    def cat(self, a: Stored, b: Stored) -> Stored:
        """Two stored pieces as one, b's tokens after a's."""
        self._check_block()
        parts = {name: append(part, b.parts[name]) for name, part in a.parts.items()}
        return replace(a, parts=parts, shape=(*a.shape[:-2], a.n_tokens + b.n_tokens, a.shape[-1]))

    def take(self, stored: Stored, rows: Tensor | None = None, blocks: int | None = None) -> Stored:
        """Some batch rows (`rows`, indices into the first dimension), or only the first `blocks` blocks."""
        parts, (*lead, T, D) = stored.parts, stored.shape
        if rows is not None:
            if not lead:
                raise KvminiError("a tensor [T, D] has no batch rows to take")
            parts = {name: part[rows] for name, part in parts.items()}
            lead[0] = len(rows)
        if blocks is not None:
            self._check_block()
            here = T // self.block
            blocks = min(blocks, here)
            parts = {name: part[..., :blocks * part.shape[-2] // max(1, here), :].clone()
                     for name, part in parts.items()}
            T = blocks * self.block
        return replace(stored, parts=parts, shape=(*lead, T, D))

    def affine(self, stored: Stored) -> tuple[Tensor, Tensor, Tensor] | None:
        """(packed, scale, minimum) where x is code * scale + minimum, for kernels; else None."""
        return None

    def map_query(self, q: Tensor, stored: Stored) -> Tensor:
        """The query `[B, H, S, D]` for keys that are read without their factors or rotation: here, as it is."""
        return q

    def map_output(self, out: Tensor, stored: Stored) -> Tensor:
        """The output `[B, H, S, D]` of values that were read without theirs: here, as it is."""
        return out

    def _check_block(self) -> None:
        if self.block is None:
            raise KvminiError("what a quantizer with block None stored is one piece: it cannot be joined or cut")


def check_tensor(x: Tensor) -> None:
    """Raise KvminiError unless x is a floating-point tensor `[..., T, D]` of finite values."""
    if not isinstance(x, Tensor) or x.dtype not in FLOATS or x.ndim < 2:
        found = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise KvminiError(f"a quantizer takes a float16, bfloat16, float32 or float64 tensor [..., T, D], not {found}")
    bad = ~torch.isfinite(x)
    if bad.any():
        first = tuple(bad.nonzero()[0].tolist())
        raise KvminiError(f"a quantizer takes finite values only: {int(bad.sum())} of {x.numel()} are NaN or inf, "
                          f"the first is {x[first].item()} at index {list(first)}")
