"""Laws of packing. A packer under test has `pack(codes, n_bits)`, `unpack(packed, n_bits, n)` and
`packed_size(n, n_bits)`, as `kvmini.packing` has. Next file: `ropes.py`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from kvmini.laws.law import Broken, called, law, within


@dataclass(frozen=True, eq=False)
class Row:
    """Codes `[rows, n]` of n_bits each."""

    packer: Any
    n_bits: int
    codes: Tensor

    def __str__(self) -> str:
        return f"{self.codes.shape[-1]} codes of {self.n_bits} bits in {self.codes.shape[0]} rows"


@st.composite
def rows(draw, offer, variant: str) -> Row:
    """Every width and every length up to 40, the largest code among them."""
    n_bits, n, many = draw(st.integers(1, 8)), draw(st.integers(0, 40)), draw(st.integers(1, 3))
    codes = draw(st.lists(st.integers(0, 2**n_bits - 1) | st.just(2**n_bits - 1), min_size=n * many, max_size=n * many))
    return Row(offer.factory, n_bits, torch.tensor(codes, dtype=torch.uint8).view(many, n))


@law("L10", "packer", rows)
def pack_and_unpack_are_inverse(row: Row) -> None:
    """Unpacking what was packed gives the codes back, for 1 to 8 bits and every length."""
    packed = called(row, "pack", row.packer.pack, row.codes, row.n_bits)
    unpacked = called(row, "unpack", row.packer.unpack, packed, row.n_bits, row.codes.shape[-1])
    within(row, "the code", unpacked, row.codes)


@law("L10", "packer", rows)
def packed_size_is_kept(row: Row) -> None:
    """A row of n codes takes ceil(n n_bits / 8) bytes, as `packed_size` says, and nothing hides behind them."""
    packed = called(row, "pack", row.packer.pack, row.codes, row.n_bits)
    n = row.codes.shape[-1]
    wanted = -(-n * row.n_bits // 8)
    said = called(row, "packed_size", row.packer.packed_size, n, row.n_bits)
    held = packed.untyped_storage().nbytes() // len(row.codes)
    if not packed.shape[-1] == said == held == wanted or packed.dtype != torch.uint8:
        raise Broken(f"{row}: a row is {packed.shape[-1]} {packed.dtype}, {held} bytes are held, packed_size says "
                     f"{said}; expected {wanted} bytes")
