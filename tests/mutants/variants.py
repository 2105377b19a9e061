"""Implementations that are right and look different: no law may blame them."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from mutant_caches import Store, in_a_cache
from mutant_grids import Clamped, ends
from mutant_kernels import attend, heads, scores
from mutant_packers import Packer
from numpy_variant import Numpy

from kvmini import Stored, UniformQuantizer, axes
from kvmini.packing import pack, unpack
from kvmini.rounding import round_nearest, round_up


class Hidden:
    """Minimum and scale rounded to nearest, codes clamped; nothing of what is stored is shown."""

    def __init__(self, n_bits, axis, group_size):
        self.levels, self.axis, self.group_size = 2**n_bits - 1, axis, group_size
        self.block = axes.block(axis, group_size)

    def quantize(self, x):
        if not x.isfinite().all():
            raise ValueError("NaN or inf")
        groups = axes.split(x.double(), self.axis, self.group_size)
        low, high = ends(groups)
        exact = torch.stack([(high - low) / self.levels, low])
        if (exact.abs() > torch.finfo(torch.float16).max).any():
            raise OverflowError("a scale or minimum past float16")
        scale, minimum = round_nearest(exact, torch.float16)
        step = scale.double()[..., None]
        codes = torch.where(step > 0, (groups - minimum.double()[..., None]) / step, 0).round().clamp(0, self.levels)
        return codes.to(torch.uint8), scale, minimum, x.shape, x.dtype

    def dequantize(self, stored):
        codes, scale, minimum, shape, dtype = stored
        x = axes.join(codes * scale.double()[..., None] + minimum.double()[..., None], self.axis, shape)
        return x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


class PackBits(Packer):
    """numpy.packbits: the first code in the high bits."""

    @staticmethod
    def pack(codes, n_bits):
        bits = np.unpackbits(codes.contiguous().numpy()[..., None], axis=-1)[..., 8 - n_bits:]
        return torch.from_numpy(np.packbits(bits.reshape(*codes.shape[:-1], codes.shape[-1] * n_bits), axis=-1))

    @staticmethod
    def unpack(packed, n_bits, n):
        bits = np.unpackbits(packed.contiguous().numpy(), axis=-1, count=n * n_bits)
        return torch.from_numpy(np.packbits(bits.reshape(*packed.shape[:-1], n, n_bits), axis=-1)[..., 0] >> 8 - n_bits)


def repacked(kind, stored, packed):
    """The same with its codes in another format."""
    return kind(**{**vars(stored), "parts": {**stored.parts, "packed": packed}})


class BigEndian(UniformQuantizer):
    """Codes in the bit order of numpy.packbits."""

    class Bits(Stored):
        def codes(self):
            return PackBits.unpack(self.parts["packed"], self.n_bits, self.shape[-1])

    def quantize(self, x):
        stored = super().quantize(x)
        return repacked(self.Bits, stored, PackBits.pack(stored.codes(), self.n_bits))


class AlongTheTokens(UniformQuantizer):
    """A channel's codes side by side (KIVI's keys); pieces are not joined."""

    cat = take = None

    class Columns(Stored):
        def codes(self):
            return unpack(self.parts["packed"], self.n_bits, self.n_tokens).mT.contiguous()

    def quantize(self, x):
        stored = super().quantize(x)
        return repacked(self.Columns, stored, pack(stored.codes().mT, self.n_bits))


class BitPlanes(UniformQuantizer):
    """The first bits of a group's codes, then the second ones, ...; pieces are not joined."""

    cat = take = None

    class Planes(Stored):
        def codes(self):
            axis, group_size = vars(self)["cut"]
            planes = unpack(self.parts["packed"], 1, group_size)
            return axes.join((planes << torch.arange(self.n_bits)[:, None]).sum(-2), axis, self.shape).to(torch.uint8)

    def quantize(self, x):
        stored = super().quantize(x)
        groups = axes.split(stored.codes(), self.axis, self.group_size)
        planes = (groups[..., None, :] >> torch.arange(self.n_bits)[:, None]) & 1
        found = repacked(self.Planes, stored, pack(planes, 1))
        vars(found)["cut"] = self.axis, groups.shape[-1]
        return found


class WholeToken(UniformQuantizer):
    """A group is a whole token; others are not offered."""

    def quantize(self, x):
        if x.shape[-1] != self.group_size:
            raise NotImplementedError("a group is a whole token")
        return super().quantize(x)


class Lazy(UniformQuantizer):
    """What is stored can read itself, and does when asked."""

    @dataclass(frozen=True, eq=False)
    class Later(Stored):
        quantizer: UniformQuantizer

        def read(self):
            return UniformQuantizer.dequantize(self.quantizer, self)

    def quantize(self, x):
        return self.Later(**vars(super().quantize(x)), quantizer=self)

    def dequantize(self, stored):
        return stored.read()


class Float64Minimum(Clamped):
    """The minimum is kept as it is."""

    does_not_promise = {"L27": "a minimum takes 8 bytes"}  # noqa: RUF012

    def _grid(self, groups):
        low, high = ends(groups)
        super()._grid(groups)
        return {"scale": round_up(((high - low) / self.levels).clamp(max=65504), torch.float16), "minimum": low}

    def _arithmetic(self, dtype):
        return torch.float64


def only(one_axis, kind, groups=(5, 8, 32)):
    """That quantizer, for one axis."""
    def factory(n_bits, axis, group_size):
        if axis != one_axis or group_size not in groups:
            raise NotImplementedError(f"{one_axis} in groups of {groups} only")
        return kind(n_bits=n_bits, axis=axis, group_size=group_size)
    return factory


class ComplexRope:
    """The rotation as a multiplication of complex numbers."""

    def __init__(self, head_dim, base):
        self.theta = base ** (-2 * torch.arange(head_dim // 2, dtype=torch.float64) / head_dim)

    def apply(self, x, positions, sign=1):
        angle = sign * torch.tensor(positions, dtype=torch.float64)[:, None] * self.theta
        turned = torch.complex(*x.double().chunk(2, dim=-1)) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)

    def undo(self, x, positions):
        return self.apply(x, positions, sign=-1)


def merged(q, keys, values):
    """Stored and recent tokens apart, merged by their largest scores (flash attention)."""
    s, v, n = scores(q, keys.read()), heads(values.read(), q), sum(values.parts[:2])
    top, total, out = torch.full_like(s[..., :1], -1e30), 0, 0
    for part in (slice(n), slice(n, None)):
        if v[..., part, :].shape[-2]:
            before, top = top, torch.maximum(top, s[..., part].amax(-1, keepdim=True))
            weights, kept = (s[..., part] - top).exp(), (before - top).exp()
            total, out = total * kept + weights.sum(-1, keepdim=True), out * kept + weights @ v[..., part, :]
    return out / total


@in_a_cache
class ListOfTokens(Store):
    """The window is a list of single tokens."""

    @property
    def window(self):
        return None if self.tokens is None else torch.cat([self.sink[..., :0, :], *self.tokens], dim=-2)

    @window.setter
    def window(self, x):
        self.tokens = None if x is None else [token.clone() for token in x.split(1, dim=-2)]

    @property
    def exact_tensors(self):
        return [] if self.body is None else [self.sink, *self.tokens]


@in_a_cache
class RoomToGrow(Store):
    """The window lies in a buffer of twice its length, which `nbytes` does not count."""

    @property
    def window(self):
        return None if self.buffer is None else self.buffer[..., :self.used, :]

    @window.setter
    def window(self, x):
        self.buffer = self.used = None
        if x is not None:
            self.buffer, self.used = torch.cat([x, torch.zeros_like(x)], dim=-2), x.shape[-2]


RIGHT = {
    "quantizer": {
        "float32": partial(UniformQuantizer, scale_dtype=torch.float32),
        "bfloat16": partial(UniformQuantizer, scale_dtype=torch.bfloat16),
        "symmetric": partial(UniformQuantizer, symmetric=True),
        "symmetric, float32": only("per_channel", partial(UniformQuantizer, symmetric=True, scale_dtype=torch.float32)),
        "hidden": Hidden, "numpy": Numpy, "clamped": only("per_tensor", Clamped),
        "one axis": only("per_token", UniformQuantizer), "big-endian": only("per_token", BigEndian),
        "along the tokens": only("per_channel", AlongTheTokens), "bit planes": only("per_channel", BitPlanes),
        "whole tokens": only("per_token", WholeToken, groups=(5,)), "lazy": only("per_channel", Lazy),
        "float64 minimum": only("per_token", Float64Minimum),
    },
    "packer": {"plain": Packer, "packbits": PackBits},
    "rope": {"complex": ComplexRope},
    "cache": {"list of tokens": ListOfTokens, "room to grow": RoomToGrow},
    "kernel": {"plain": lambda q, keys, values: attend(q, keys.read(), values.read()), "merged": merged},
}
