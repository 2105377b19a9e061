"""A uniform quantizer in plain numpy, written from the formulas."""

from dataclasses import dataclass

import numpy as np


class Numpy:
    """per_token and per_channel; a group is the dimension `across` of what `split` gives."""

    @dataclass
    class Stored:
        packed: np.ndarray
        scale: np.ndarray
        minimum: np.ndarray
        n_bits: int
        dtype: np.dtype
        shape: tuple

        @property
        def nbytes(self):
            return self.packed.nbytes + self.scale.nbytes + self.minimum.nbytes

        def codes(self):
            bits = np.unpackbits(self.packed, axis=-1, count=self.shape[-1] * self.n_bits)
            return np.packbits(bits.reshape(*self.shape, self.n_bits), axis=-1)[..., 0] >> 8 - self.n_bits

    def __init__(self, n_bits, axis, group_size):
        if axis == "per_tensor":
            raise NotImplementedError("per_token and per_channel only")
        self.n_bits, self.group_size, self.across = n_bits, group_size, -2 if axis == "per_channel" else -1
        self.block = group_size if axis == "per_channel" else 1

    def split(self, x):
        n, other = x.shape[self.across] // self.group_size, x.shape[-2:][self.across + 1]
        shape = (n, self.group_size, other) if self.across == -2 else (other, n, self.group_size)
        return x.reshape(*x.shape[:-2], *shape)

    def spread(self, per_group):
        return np.expand_dims(per_group.astype(np.float64), self.across)

    @np.errstate(over="ignore")
    def quantize(self, x):
        if not isinstance(x, np.ndarray) or not np.isfinite(x).all():
            raise ValueError("finite numpy arrays only")
        groups = self.split(x.astype(np.float64))
        low, high = groups.min(self.across), groups.max(self.across)
        if max(np.abs(low).max(initial=0), ((high - low) / (2**self.n_bits - 1)).max(initial=0)) > 65504:
            raise ValueError("a scale or minimum past float16")
        near = low.astype(np.float16)
        minimum = np.where((low < high) & (near > low), np.nextafter(near, np.float16(-np.inf)), near)
        wanted = np.where(low < high, (high - minimum) / (2**self.n_bits - 1), 0)
        near = wanted.astype(np.float16)
        scale = np.where(near < wanted, np.nextafter(near, np.float16(np.inf)), near)
        step = self.spread(scale)
        codes = np.rint((groups - self.spread(minimum)) / np.where(step > 0, step, 1)).reshape(x.shape).astype(np.uint8)
        bits = np.unpackbits(codes[..., None], axis=-1)[..., 8 - self.n_bits:]
        packed = np.packbits(bits.reshape(*x.shape[:-1], x.shape[-1] * self.n_bits), axis=-1)
        return self.Stored(packed, scale, minimum, self.n_bits, x.dtype, x.shape)

    def dequantize(self, stored):
        x = self.split(stored.codes()) * self.spread(stored.scale) + self.spread(stored.minimum)
        limit = np.finfo(stored.dtype)
        return x.clip(limit.min, limit.max).astype(stored.dtype).reshape(stored.shape)
