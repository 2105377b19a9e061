"""A case: one quantizer, made for one input, and the arithmetic by which its result is judged.

Every number is brought to torch and, for comparison, to float64. The slack of a law is derived from float
arithmetic here, once: see `Case.slack`. It does not know any law. Next file: `offers.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from kvmini import axes
from kvmini.laws.law import Broken, called
from kvmini.laws.tensors import ALL_KINDS, kv_tensors


class Limits(NamedTuple):
    """What a floating-point type can hold."""

    eps: float
    smallest_normal: float
    max: float

    @classmethod
    def of(cls, *dtypes: torch.dtype) -> "Limits":
        """Those of a type; of several, the worst in each respect (bfloat16 is coarser, float16 ends earlier)."""
        found = [torch.finfo(dtype) for dtype in dtypes]
        return cls(max(f.eps for f in found), max(f.smallest_normal for f in found), min(f.max for f in found))


def ulp(x: Tensor, type_: torch.dtype | Limits) -> Tensor:
    """The distance from |x| to the next larger value of a type, float64.

    Example:
        >>> ulp(torch.tensor([1.0, 100.0]), torch.float16).tolist()
        [0.0009765625, 0.0625]
    """
    limits = type_ if isinstance(type_, Limits) else Limits.of(type_)
    mantissa, _ = torch.frexp(x := x.double().abs().clamp(limits.smallest_normal))
    return x / mantissa * (limits.eps / 2)  # x / mantissa is a power of two, the one above x


@dataclass(frozen=True, eq=False)
class Case:
    """One quantizer and one input `x [..., T, D]`."""

    offer: Any  # whose factory made it, and what it was found to offer
    n_bits: int
    axis: str
    group_size: int
    x: Tensor

    def __str__(self) -> str:
        groups = "" if self.axis == "per_tensor" else f", groups of {self.group_size}"
        dtype = str(self.x.dtype).removeprefix("torch.")
        return f"{dtype} {list(self.x.shape)}, {self.n_bits} bits, {self.axis}{groups}"

    # --- what the implementation does

    @cached_property
    def quantizer(self):
        return self.offer.factory(n_bits=self.n_bits, axis=self.axis, group_size=self.group_size)

    def given(self, x: Tensor):
        """x as the implementation takes it."""
        return x.numpy() if self.offer.is_numpy else x

    @cached_property
    def stored(self):
        return self.quantize(self.x)

    @cached_property
    def x_hat(self) -> Tensor:
        return self.dequantize(self.stored)

    def quantize(self, x: Tensor):
        return called(self, "quantize", self.quantizer.quantize, self.given(x))

    def dequantize(self, stored) -> Tensor:
        return self.tensor("what dequantize returns", called(self, "dequantize", self.quantizer.dequantize, stored))

    def roundtrip(self, x: Tensor) -> Tensor:
        return self.dequantize(self.quantize(x))

    def codes(self, stored=None) -> Tensor:
        stored = self.stored if stored is None else stored
        return self.tensor("codes", called(self, "codes()", stored.codes))

    def tensor(self, what: str, value) -> Tensor:
        """A torch tensor, whatever arrays the implementation uses."""
        if self.offer.is_numpy and isinstance(value, np.ndarray | np.generic):
            return torch.from_numpy(np.ascontiguousarray(value))
        if not isinstance(value, Tensor):
            raise Broken(f"{self}: {what} is a {type(value).__name__}, not an array like the input")
        return value.detach()

    def on(self, x: Tensor) -> "Case":
        """The same quantizer on another input."""
        return replace(self, x=x)

    # --- groups

    def groups(self, x: Tensor) -> Tensor:
        """x cut into groups, float64, the group last."""
        return axes.split(x.double(), self.axis, self.group_size)

    def spread(self, per_group: Tensor) -> Tensor:
        """One number a group, given to each of its elements: x's shape."""
        like = axes.split(self.x, self.axis, self.group_size)
        return axes.join(per_group[..., None].expand_as(like), self.axis, self.x.shape)

    @cached_property
    def low(self) -> Tensor:
        return self.groups(self.x).amin(-1)

    @cached_property
    def high(self) -> Tensor:
        return self.groups(self.x).amax(-1)

    @property
    def largest(self) -> Tensor:
        """The largest magnitude of each group."""
        return torch.maximum(self.low.abs(), self.high.abs())

    @property
    def symmetric(self) -> bool:
        return "asymmetric" not in self.offer.shows

    @property
    def levels(self) -> int:
        """Steps of the grid: 2^n_bits - 1, or an even number of them about zero."""
        return 2**self.n_bits - (2 if self.symmetric else 1)

    @property
    def ideal_scale(self) -> Tensor:
        """The scale before it is rounded."""
        return (2 * self.largest if self.symmetric else self.high - self.low) / self.levels

    @cached_property
    def scale(self) -> Tensor:
        """The stored scale of each group."""
        scale = self.tensor("scale", self.stored.scale).double()
        if scale.shape != self.low.shape:
            raise Broken(f"{self}: scale has shape {list(scale.shape)}, expected {list(self.low.shape)}")
        return scale

    @property
    def minimum(self) -> Tensor:
        """The stored minimum of each group."""
        minimum = self.tensor("minimum", self.stored.minimum).double()
        if minimum.shape != self.low.shape:
            raise Broken(f"{self}: minimum has shape {list(minimum.shape)}, expected {list(self.low.shape)}")
        return minimum

    # --- float arithmetic

    @property
    def kept_in(self) -> tuple[torch.dtype, ...]:
        """The type of the stored scale and minimum; where that is hidden, float16 or x's, whichever is worse."""
        if self.offer.scale_dtype is not None:
            return (self.offer.scale_dtype,)
        return (self.x.dtype,) if "scale" in self.offer.shows else (torch.float16, self.x.dtype)

    @property
    def kept(self) -> Limits:
        return Limits.of(*self.kept_in)

    @property
    def bound(self) -> Tensor:
        """How far any element may be off: half a step and the slack, as in law L03. One number a group.

        Math:
            scale shown: scale / 2. Not shown, minimum m and scale s0 = (max - min) / L rounded to nearest: inside
            the grid s0 / 2 + ulp(s0) / 4, past its ends ulp(m) / 2 + L ulp(s0) / 2; the larger.
            Equal values are the minimum, rounded to nearest: ulp(m) / 2.
        """
        kept, constant = self.kept, ulp(self.low, self.kept) / 2
        if "scale" in self.offer.shows:
            inside = self.scale / 2
            constant = torch.maximum(constant, inside)  # a grid through zero has a scale here, too
        else:
            s0 = self.ideal_scale
            inside = torch.maximum(s0 / 2 + ulp(s0, kept) / 4, constant + self.levels * ulp(s0, kept) / 2)
        if not self.symmetric:
            inside = torch.where(self.low == self.high, constant, inside)
        return inside + self.slack

    @property
    def slack(self) -> Tensor:
        """What float arithmetic may add to any error, one number a group.

        Math:
            |x| <= M. In float32, the least that is expected, x - minimum (at most 2M) is off by at most 1 ulp(M), the
            division by 2 ulp(M) in units of x, code * scale + minimum by 1 ulp(M): 4 in all. Then half an ulp of the
            output.
        """
        out = torch.maximum(self.largest, self.groups(self.x_hat).abs().amax(-1))
        return 4 * ulp(self.largest, torch.float32) + ulp(out, self.x.dtype) / 2

    def note(self, i: tuple[int, ...]) -> str:
        """What is worth knowing about the group of element i of x."""
        if len(i) != self.x.ndim:
            return ""
        text = f"; its group runs from {self.spread(self.low)[i].item():.9g} to {self.spread(self.high)[i].item():.9g}"
        if self.group_size <= 8 and self.axis != "per_tensor":
            number = self.spread(torch.arange(self.low.numel()).view(self.low.shape))[i]
            text += f" ({', '.join(f'{x:.9g}' for x in self.groups(self.x).flatten(0, -2)[number].tolist())})"
        return text + (f", stored scale {self.spread(self.scale)[i].item():.6g}" if "scale" in self.offer.shows else "")


def inputs(offer, axis: str, group_size: int, kinds=ALL_KINDS, largest: float = 2.0**11,
           square: bool = False) -> st.SearchStrategy[Tensor]:
    """Tensors that groups of this size divide (`square`: both T and D), of ranges that a float16 scale can hold, also
    when 128 of them are rotated together."""
    return kv_tensors(
        dtypes=offer.dtypes, kinds=kinds, largest=largest,
        tokens=group_size if square or axis == "per_channel" else 1,
        channels=group_size if square or axis == "per_token" else 1)


def cases(n_bits: Callable[[int], bool] = bool, **options) -> Callable:
    """The domain "any quantizer offered, any of these `inputs`"."""
    def domain(offer, axis: str) -> st.SearchStrategy[Case]:
        configs = [config for config in offer.configs[axis] if n_bits(config[0])]

        @st.composite
        def case(draw) -> Case:
            bits, group_size = draw(st.sampled_from(configs) if configs else st.nothing())
            return Case(offer, bits, axis, group_size, draw(inputs(offer, axis, group_size, **options)))
        return case()
    return domain
