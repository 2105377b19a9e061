"""The same sums as one loop over the packed bytes, which `torch.compile` writes in C++.

In plain torch every operation reads and writes memory: a plane of codes is made, turned into floats, multiplied.
Fused, a byte is read once, and its codes never leave the registers. For that the sums are written out as elementwise
products, all query rows side by side (so that they share what was unpacked), and with two habits of the compiler in
mind: it turns a sum into vector instructions where the other dimension is long and in one piece, and it sums up to a
few hundred terms without the bookkeeping that keeps longer sums exact; so values are summed 128 tokens at a time.

Compiled are the right axes (keys per_channel, before RoPE too, and values per_token) in float32 for few query rows;
all else, and every machine without a C++ compiler, gets the twin. Next file: `kernels/decode.py`.
"""

import warnings
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from kvmini.kernels import twin
from kvmini.kernels.source import Grid
from kvmini.packing import by_plane, planes, word
from kvmini.rope import Rope

LEAST = 512  # tokens: below, there is nothing to gain
ROWS = 8  # query rows of a key head; each is written out in the compiled loop
RUN = 128  # tokens whose products are summed in one go


def scores(q: Tensor, body: Grid) -> Tensor:
    """As `twin.scores`."""
    if body.per_token or not _worth(q, body):
        return twin.scores(q, body)
    scale, minimum = body.scale.to(q.dtype), body.minimum.to(q.dtype)
    folded = by_plane((q[:, :, :, None] * scale[:, :, None]).movedim(2, 0), body.n_bits)  # [P, R, B, Hkv, T/G, words]
    code = body.packed.unflatten(-2, (-1, body.group_size))
    found = _run(_scores, folded, (q @ minimum.mT), code, body.n_bits)
    return twin.scores(q, body) if found is None else found


def averages(weights: Tensor, body: Grid) -> Tensor:
    """As `twin.averages`."""
    if not body.per_token or not _worth(weights, body):
        return twin.averages(weights, body)
    scale, minimum = body.scale.to(weights.dtype), body.minimum.to(weights.dtype)
    words = body.D // word(body.n_bits)[0]
    spread = scale.repeat_interleave(words // scale.shape[-1], dim=-1)  # [B, Hkv, T, words]
    found = _run(_averages, weights, spread, body.packed, body.n_bits)
    if found is None:
        return twin.averages(weights, body)
    return (found.unflatten(-1, (-1, body.group_size)) + (weights @ minimum)[..., None]).flatten(-2)


def rotated_scores(q: Tensor, body: Grid, rope: Rope, first: int) -> Tensor:
    """As `twin.rotated_scores`."""
    P = word(body.n_bits)[0]
    if body.per_token or not _worth(q, body) or body.D // 2 % P:  # a channel and its pair in the same plane
        return twin.rotated_scores(q, body, rope, first)
    tables = _tables(rope, range(first, first + body.packed.shape[-2]), body.group_size, P, q.dtype)
    scale, minimum = (by_plane(x.to(q.dtype), body.n_bits) for x in (body.scale, body.minimum))  # [P, B, Hkv, T/G, W]
    code = body.packed.unflatten(-2, (-1, body.group_size))
    found = _run(_rotated_scores, by_plane(q.movedim(2, 0), body.n_bits), scale, minimum, *tables, code, body.n_bits)
    return twin.rotated_scores(q, body, rope, first) if found is None else found


# --- what is compiled

def _scores(folded: Tensor, base: Tensor, code: Tensor, n_bits: int) -> Tensor:
    rows = [torch.zeros((), dtype=folded.dtype)] * folded.shape[1]
    for p, plane in enumerate(planes(code, n_bits)):
        plane = plane.to(folded.dtype)  # [B, Hkv, T/G, G, words]
        rows = [sum_ + plane * q[:, :, :, None] for sum_, q in zip(rows, folded[p], strict=True)]
    return (torch.stack([row.sum(-1) for row in rows], 2) + base[..., None]).flatten(-2)


def _averages(weights: Tensor, spread: Tensor, packed: Tensor, n_bits: int) -> Tensor:
    T = packed.shape[-2]
    whole = T // RUN * RUN

    def runs(x: Tensor) -> Tensor:
        return x[:, :, :whole].unflatten(2, (-1, RUN))

    def last(x: Tensor) -> Tensor:
        return x[:, :, T - RUN:]

    rest = torch.arange(T - RUN, T) >= whole  # the last run overlaps the one before it: that part counts 0
    found = []
    for many, few in zip(planes(runs(packed), n_bits), planes(last(packed), n_bits), strict=True):
        many, few = many * runs(spread), few * last(spread)
        found.append(torch.stack([(many * runs(w)[..., None]).sum(3).sum(2) + (few * (last(w) * rest)[..., None]).sum(2)
                                  for w in weights.unbind(2)], dim=2))
    return torch.stack(found, dim=-1).flatten(-2)


def _rotated_scores(q: Tensor, scale: Tensor, minimum: Tensor, cos: Tensor, sin: Tensor, code: Tensor,
                    n_bits: int) -> Tensor:
    rows = [torch.zeros((), dtype=q.dtype)] * q.shape[1]
    for p, plane in enumerate(planes(code, n_bits)):
        k = plane.to(q.dtype) * scale[p][:, :, :, None] + minimum[p][:, :, :, None]
        one, two = k.chunk(2, dim=-1)  # the words of channel c, and those of c + D/2
        one, two = one * cos[p] - two * sin[p], two * cos[p] + one * sin[p]
        for r, row in enumerate(q[p]):  # [B, Hkv, words]
            q_one, q_two = row[:, :, None, None].chunk(2, dim=-1)
            rows[r] = rows[r] + one * q_one + two * q_two
    return torch.stack([row.sum(-1) for row in rows], 2).flatten(-2)


# --- around it

def _worth(rows: Tensor, body: Grid) -> bool:
    return (rows.dtype == torch.float32 and rows.device.type == "cpu" and rows.shape[2] <= ROWS
            and body.packed.shape[-2] >= LEAST)


@lru_cache(maxsize=2)
def _tables(rope: Rope, positions: range, G: int, P: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin `[P, T/G, G, D/2/P]`; all layers of a step share them."""
    with torch.inference_mode(False):
        return tuple(x.unflatten(-1, (-1, P)).movedim(-1, 0).unflatten(1, (-1, G)).contiguous()
                     for x in rope.cos_sin(positions, torch.empty(0, dtype=dtype)))


_works: bool | None = None  # whether anything could be compiled; unknown until it is tried


@lru_cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, fullgraph=True)


def _run(function: Callable, *args: Tensor | int) -> Tensor | None:
    """The compiled function's result; None where it cannot be compiled, or not for yet another kind of arguments."""
    global _works
    if _works is False:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _compiled(function)(*args)
    except Exception:  # no compiler, one that fails, too many kinds of arguments: each raises something else
        _works = bool(_works)
        return None
    _works = True
    return found
