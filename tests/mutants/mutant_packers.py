"""Broken packers and RoPEs, each by one mistake that people make, and the laws that must notice."""

import torch

from kvmini import Rope, packing


class Packer:
    """Nothing wrong: the functions of `kvmini.packing`, to be overridden one at a time."""

    pack, unpack, packed_size = map(staticmethod, (packing.pack, packing.unpack, packing.packed_size))


class TailLost(Packer):
    """Only whole bytes are written: the last codes are gone."""

    @staticmethod
    def pack(codes, n_bits):
        whole = codes.shape[-1] * n_bits // 8 * 8 // n_bits
        return packing.pack(codes[..., :whole], n_bits)


class OtherEnd(Packer):
    """Written with the last code first, read with the first one first."""

    @staticmethod
    def pack(codes, n_bits):
        return packing.pack(codes.flip(-1), n_bits)


class OneByteMore(Packer):
    """n * n_bits // 8 + 1 bytes, also where nothing is left over."""

    @staticmethod
    def packed_size(n, n_bits):
        return n * n_bits // 8 + 1


class WholeCodesAByte(Packer):
    """8 // n_bits codes a byte: at 3 bits two, and two bits of each byte are wasted."""

    @staticmethod
    def pack(codes, n_bits):
        return packing.pack(codes, {3: 4, 5: 8, 6: 8, 7: 8}.get(n_bits, n_bits))

    @staticmethod
    def unpack(packed, n_bits, n):
        return packing.unpack(packed, {3: 4, 5: 8, 6: 8, 7: 8}.get(n_bits, n_bits), n)


class CrossingBitsLost(Packer):
    """Shifts in uint8: of a code that crosses into the next byte only the low bits are written."""

    @staticmethod
    def pack(codes, n_bits):
        room = 8 - n_bits * torch.arange(codes.shape[-1]) % 8
        return packing.pack((codes.long() & (1 << room) - 1).to(torch.uint8), n_bits)


class SignBit(Packer):
    """Bytes are read as int8: the last code of a byte brings its sign along."""

    @staticmethod
    def unpack(packed, n_bits, n):
        codes = packing.unpack(packed, n_bits, n).to(torch.int8)
        last = n_bits * (1 + torch.arange(n)) % 8 == 0
        return torch.where(last & (codes.long() >= 2 ** (n_bits - 1)), codes - 2**n_bits, codes)


class KeepsTheWords(Packer):
    """The bytes are a view of the padded words they were made in."""

    @staticmethod
    def pack(codes, n_bits):
        packed = packing.pack(codes, n_bits)
        return torch.nn.functional.pad(packed, (0, 4))[..., :packed.shape[-1]]


class Interleaved(Rope):
    """Pairs (2c, 2c + 1), as in GGUF files, in a model whose pairs are (c, c + D/2)."""

    @staticmethod
    def turn(x, cos, sin):
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)


class UndoTurnsOn(Rope):
    """undo forgets to change the sign of the sine."""

    undo = Rope.apply


class Float32Angles(Rope):
    """Angles in float32: at position 2^20 they are off by 0.06."""

    def cos_sin(self, positions, x):
        theta = self.base ** (-torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim)
        angle = torch.tensor(positions, dtype=torch.float32)[:, None] * theta
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


class Float16Table(Rope):
    """cos and sin are kept in float16 (a model cast as a whole)."""

    def cos_sin(self, positions, x):
        return tuple(table.half().to(x.dtype) for table in super().cos_sin(positions, x))


class OddExponent(Rope):
    """base^(-(2c+1)/D)."""

    def cos_sin(self, positions, x):
        theta = self.base ** (-torch.arange(1, self.head_dim, 2, dtype=torch.float64) / self.head_dim)
        angle = torch.tensor(positions, dtype=torch.float64)[:, None] * theta
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


class FirstIsOne(Rope):
    """Positions are counted from 1."""

    def cos_sin(self, positions, x):
        return super().cos_sin(range(positions.start + 1, positions.stop + 1), x)


class HalfOfTheHead(Rope):
    """Only the first half of the pairs is turned (a partial rotary factor read from another model)."""

    def cos_sin(self, positions, x):
        cos, sin = (table.clone() for table in super().cos_sin(positions, x))
        cos[..., self.head_dim // 4:], sin[..., self.head_dim // 4:] = 1, 0
        return cos, sin


class TableTooShort(Rope):
    """cos and sin for 2048 positions; later ones take the last."""

    def cos_sin(self, positions, x):
        return super().cos_sin(torch.tensor(positions).clamp(max=2047), x)


class TurnedInPlace(Rope):
    """The caller's keys are turned, too."""

    def apply(self, x, positions):
        return x.copy_(super().apply(x, positions))


KILLED_BY = {
    "packer": dict.fromkeys([TailLost, OtherEnd, OneByteMore, WholeCodesAByte, CrossingBitsLost, SignBit,
                             KeepsTheWords], "L10"),
    "rope": dict.fromkeys([Interleaved, UndoTurnsOn, Float32Angles, Float16Table, OddExponent, FirstIsOne,
                           HalfOfTheHead, TableTooShort, TurnedInPlace], "L17"),
}
