"""Packing: codes of 1 to 8 bits as bytes, with no bit wasted.

The last dimension is a little-endian stream of bits: code j sits at bits `j * n_bits` onwards, padded
once, at the end of the row, to a whole byte. At 2 bits a byte holds four codes; at 3 bits three bytes
hold eight. It does not know what the codes mean. Next file: `rounding.py`.
"""

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
    codes_per_word, bytes_per_word = _word(n_bits)
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
    codes_per_word, bytes_per_word = _word(n_bits)
    packed = F.pad(packed, (0, -packed.shape[-1] % bytes_per_word)).unflatten(-1, (-1, bytes_per_word))
    if bytes_per_word > 1:  # a one-byte word is already itself, and stays in fast 8-bit arithmetic
        packed = (packed.long() << 8 * torch.arange(bytes_per_word, device=packed.device)).sum(-1, keepdim=True)
    shifts = n_bits * torch.arange(codes_per_word, device=packed.device, dtype=packed.dtype)
    return ((packed >> shifts) & (2**n_bits - 1)).to(torch.uint8).flatten(-2)[..., :n]


def _word(n_bits: int) -> tuple[int, int]:
    """The smallest word of whole bytes that holds whole codes: (codes in it, bytes in it)."""
    common = gcd(n_bits, 8)
    return 8 // common, n_bits // common
