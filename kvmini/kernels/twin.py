"""Attention that reads packed codes, in plain torch: the specification of the other kernels, and quick already.

Keys and values are never made. One position of the packed words at a time becomes a plane of small floats, and the
scales go to what the plane is multiplied with:

    keys    per_channel   score = sum_c (q_c scale_c) code_c + sum_c q_c minimum_c          scales folded into the query
            per_token     score = scale (sum_c q_c code_c) + minimum (sum_c q_c)            a factor of the group's sum
    values  per_token     out = sum_t (w_t scale_t) code_t + sum_t w_t minimum_t            folded into the weights
            per_channel   out = scale (sum_t w_t code_t) + minimum (sum_t w_t)              a factor of the group's sum

Keys stored before RoPE are different: each token's key must be turned before it meets the query, so their scales fold
into nothing. They are made a few hundred tokens at a time.

The functions here know a body only; sinks, window and the softmax over all are `kernels/decode.py`.
Next file: `kernels/compiled.py`.
"""

import torch
from torch import Tensor

from kvmini.kernels.source import Grid
from kvmini.packing import by_plane, planes
from kvmini.rope import Rope

CHUNK = 512  # tokens of keys before RoPE that are made at once


def scores(q: Tensor, body: Grid) -> Tensor:
    """q . k for every stored token.

    Shapes:
        q `[B, Hkv, R, D]`, all rows that share a key head -> `[B, Hkv, R, T]`
    Example:
        >>> from kvmini import UniformQuantizer
        >>> grid, k = UniformQuantizer(3, "per_channel", 8), torch.randn(1, 2, 16, 32)
        >>> stored, q = grid.quantize(k), torch.randn(1, 2, 5, 32)
        >>> found = scores(q, Grid(*grid.affine(stored), stored.n_bits, 32))
        >>> bool((found - q @ grid.dequantize(stored).mT).abs().max() < 1e-4)
        True
    """
    scale, minimum = body.scale.to(q.dtype), body.minimum.to(q.dtype)
    G = body.group_size
    if body.per_token:
        q = q.unflatten(-1, (-1, G)).movedim(-2, 2)  # [B, Hkv, D/G, R, G]
        code = body.packed.unflatten(-1, (scale.shape[-1], -1)).movedim(-2, 2)  # [B, Hkv, D/G, T, bytes of a group]
        sums = _rows_dot_codes(q, code, body.n_bits)
        scale, minimum = (x.movedim(-1, 2)[..., None, :] for x in (scale, minimum))  # [B, Hkv, D/G, 1, T]
        return (sums * scale + q.sum(-1, keepdim=True) * minimum).sum(2)
    code = body.packed.unflatten(-2, (-1, G))  # [B, Hkv, T/G, G, bytes of a token]
    sums = _rows_dot_codes(q[:, :, None] * scale[:, :, :, None], code, body.n_bits)  # [B, Hkv, T/G, R, G]
    return (sums + (q @ minimum.mT).movedim(-1, 2)[..., None]).movedim(3, 2).flatten(-2)


def averages(weights: Tensor, body: Grid) -> Tensor:
    """Stored values averaged by the weights.

    Shapes:
        weights `[B, Hkv, R, T]` -> `[B, Hkv, R, D]`
    Example:
        >>> from kvmini import UniformQuantizer
        >>> grid, v = UniformQuantizer(3, "per_token", 8), torch.randn(1, 2, 16, 32)
        >>> stored, weights = grid.quantize(v), torch.rand(1, 2, 5, 16)
        >>> found = averages(weights, Grid(*grid.affine(stored), stored.n_bits, 32))
        >>> bool((found - weights @ grid.dequantize(stored)).abs().max() < 1e-4)
        True
    """
    scale, minimum = body.scale.to(weights.dtype), body.minimum.to(weights.dtype)
    G = body.group_size
    if body.per_token:
        scaled = weights[:, :, None] * scale.movedim(-1, 2)[..., None, :]  # [B, Hkv, D/G, R, T]
        code = body.packed.unflatten(-1, (scale.shape[-1], -1)).movedim(-2, 2)
        sums = _codes_by_rows(scaled, code, body.n_bits)  # [B, Hkv, D/G, R, G]
        return (sums + (weights @ minimum).movedim(-1, 2)[..., None]).movedim(2, 3).flatten(-2)
    weights = weights.unflatten(-1, (-1, G)).movedim(-2, 2)  # [B, Hkv, T/G, R, G]
    sums = _codes_by_rows(weights, body.packed.unflatten(-2, (-1, G)), body.n_bits)[..., :body.D]
    return (sums * scale[:, :, :, None] + weights.sum(-1, keepdim=True) * minimum[:, :, :, None]).sum(2)


def rotated_scores(q: Tensor, body: Grid, rope: Rope, first: int) -> Tensor:
    """`scores` of a rotated query with keys that were stored before RoPE, the first of them at position `first`."""
    T, found = body.packed.shape[-2], []
    cos, sin = rope.cos_sin(range(first, first + T), q)
    chunk = max(1, CHUNK // body.group_size) * body.group_size
    for start in range(0, T, chunk):
        at = slice(start, start + chunk)
        keys = rope.turn(_made(body, start, min(T, at.stop), q.dtype), cos[at], sin[at])
        found.append(q @ keys.mT)
    return torch.cat(found, dim=-1)


def _rows_dot_codes(rows: Tensor, code: Tensor, n_bits: int) -> Tensor:
    """rows `[..., R, C]`, codes `[..., t, bytes of C codes]` -> `[..., R, t]`"""
    pairs = zip(by_plane(rows, n_bits), planes(code, n_bits), strict=True)
    return sum(plane.to(rows.dtype) @ rows.mT for rows, plane in pairs).mT


def _codes_by_rows(rows: Tensor, code: Tensor, n_bits: int) -> Tensor:
    """rows `[..., R, t]`, codes `[..., t, bytes of C codes]` -> `[..., R, C]`, filled up to whole words"""
    return torch.stack([rows @ plane.to(rows.dtype) for plane in planes(code, n_bits)], dim=-1).flatten(-2)


def _made(body: Grid, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Tokens start .. stop - 1 of the body `[B, Hkv, stop - start, D]`; whole groups of them."""
    codes = torch.stack(list(planes(body.packed[:, :, start:stop], body.n_bits)), -1).flatten(-2)[..., :body.D]
    if body.per_token:
        along, groups = -1, slice(start, stop)
    else:
        along, groups = -2, slice(start // body.group_size, -(-stop // body.group_size))
    scale, minimum = (x[:, :, groups].to(dtype).repeat_interleave(body.group_size, along)
                      for x in (body.scale, body.minimum))
    return torch.addcmul(minimum, codes.to(dtype), scale)
