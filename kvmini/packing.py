"""Packing: codes of 1 to 8 bits as bytes, with no bit wasted.

The last dimension is a little-endian stream of bits: code j sits at bits `j * n_bits` onwards, padded
once, at the end of the row, to a whole byte. At 2 bits a byte holds four codes; at 3 bits three bytes
hold eight. It does not know what the codes mean. Next file: `rounding.py`.
"""

from collections.abc import Iterator
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor


def packed_size(n: int, n_bits: int) -> int:
    """Bytes that n codes take: ceil(n * n_bits / 8)."""
    return (n * n_bits + 7) // 8


def pack(codes: Tensor, n_bits: int) -> Tensor:
    """Codes to bytes along the last dimension.

    Shapes:
        codes uint8 `[..., n]`, each below 2^n_bits -> uint8 `[..., ceil(n * n_bits / 8)]`
    Example:
        >>> pack(torch.tensor([1, 2, 3, 0], dtype=torch.uint8), n_bits=2).tolist()   # 0b00_11_10_01
        [57]
    """
    n = codes.shape[-1]
    codes_per_word, bytes_per_word = word(n_bits)
    codes = F.pad(codes, (0, -n % codes_per_word)).unflatten(-1, (-1, codes_per_word)).long()
    words = (codes << n_bits * torch.arange(codes_per_word, device=codes.device)).sum(-1, keepdim=True)
    packed = (words >> 8 * torch.arange(bytes_per_word, device=codes.device)) & 255
    return packed.to(torch.uint8).flatten(-2)[..., :packed_size(n, n_bits)].clone()


def unpack(packed: Tensor, n_bits: int, n: int) -> Tensor:
    """Bytes back to n codes along the last dimension: the inverse of `pack`.

    Shapes:
        packed uint8 `[..., ceil(n * n_bits / 8)]` -> codes uint8 `[..., n]`
    Example:
        >>> unpack(torch.tensor([57], dtype=torch.uint8), n_bits=2, n=4).tolist()
        [1, 2, 3, 0]
    """
    return torch.stack(list(planes(packed, n_bits)), dim=-1).flatten(-2)[..., :n]


def planes(packed: Tensor, n_bits: int) -> Iterator[Tensor]:
    """The codes, one position of their words at a time: what a kernel reads, which never has all of them at once.

    A word is the smallest run of whole bytes that holds whole codes, P of them: one byte at 1, 2, 4 and 8 bits.

    Shapes:
        packed uint8 `[..., ceil(n * n_bits / 8)]` -> P times uint8 `[..., ceil(n / P)]`; code j is number j // P of
        plane j % P.
    Example:
        >>> [plane.tolist() for plane in planes(torch.tensor([57, 2], dtype=torch.uint8), n_bits=4)]
        [[9, 2], [3, 0]]
    """
    per_word, bytes_per_word = word(n_bits)
    if rest := packed.shape[-1] % bytes_per_word:
        packed = F.pad(packed, (0, bytes_per_word - rest))
    for first in range(0, per_word * n_bits, n_bits):
        byte, shift = divmod(first, 8)
        codes = packed[..., byte::bytes_per_word] >> shift if shift else packed[..., byte::bytes_per_word]
        if shift + n_bits > 8:  # the rest of it is in the next byte
            codes = codes | packed[..., byte + 1::bytes_per_word] << 8 - shift
        yield codes & 2**n_bits - 1


def by_plane(x: Tensor, n_bits: int) -> Tensor:
    """Numbers in the order of `planes`: `[..., n]` -> `[P, ..., ceil(n / P)]`, filled up with zeros.

    Example:
        >>> by_plane(torch.arange(1, 6), n_bits=4).tolist()
        [[1, 3, 5], [2, 4, 0]]
    """
    P = word(n_bits)[0]
    return F.pad(x, (0, -x.shape[-1] % P)).unflatten(-1, (-1, P)).movedim(-1, 0).contiguous()


def word(n_bits: int) -> tuple[int, int]:
    """The smallest run of whole bytes that holds whole codes: (codes in it, bytes in it)."""
    common = gcd(n_bits, 8)
    return 8 // common, n_bits // common
