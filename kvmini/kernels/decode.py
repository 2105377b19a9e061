"""One step of attention from a compressed cache: scores of three parts, one softmax, weights given back to three parts.

Keys and values each have their own sink, body and window, and those need not end at the same tokens. What a kernel
is asked for is the two sums over a body; `PATHS` names who can do them. Next file: `cache.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmini.kernels import compiled, twin
from kvmini.kernels.source import Grid, Seen, Source
from kvmini.rope import Rope

ROWS = 16  # new tokens of a call that still are a step; more are a prefill, which dequantizes once for all of them


@dataclass(frozen=True)
class Kernel:
    """Who sums over a body: see `kernels/twin.py` for what each must give."""

    scores: Callable[[Tensor, Grid], Tensor]
    averages: Callable[[Tensor, Grid], Tensor]
    rotated_scores: Callable[[Tensor, Grid, Rope, int], Tensor]


PATHS = {"torch": Kernel(twin.scores, twin.averages, twin.rotated_scores),
         "compiled": Kernel(compiled.scores, compiled.averages, compiled.rotated_scores)}


def can_read(keys: Seen, values: Seen, S: int) -> bool:
    """Whether a kernel can read these for S new tokens: few tokens, and codes in whole words."""
    return S <= ROWS and all(isinstance(x, Source) and x.grid is not None and x.grid.whole_words
                             for x in (keys, values))


def decode(q: Tensor, keys: Source, values: Source, path: str = "torch") -> Tensor:
    """Causal grouped-query attention of the last S tokens, from codes.

    Shapes:
        q `[B, H, S, D]`, rotated; keys and values of T >= S tokens -> `[B, H, S, D]`
    """
    kernel = PATHS[path]
    B, H, S, D = q.shape
    T, Hkv = keys.length, keys.sink.shape[1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    rows = (q.to(dtype) / D**0.5).reshape(B, Hkv, -1, D)  # [B, Hkv, (H / Hkv) * S, D]
    score = torch.cat(_key_scores(rows, keys, kernel), dim=-1)  # [B, Hkv, R, T]
    if S > 1:
        hidden = torch.ones(S, S, dtype=torch.bool, device=q.device).triu(1)  # token T - S + j from query i, j > i
        score.view(B, H, S, T)[..., T - S:].masked_fill_(hidden, -torch.inf)
    parts = torch.softmax(score, dim=-1).split(values.parts, dim=-1)
    sink, body, window = parts
    out = sink @ values.sink.to(dtype) + window @ values.window.to(dtype)
    if values.parts[1]:
        out = out + kernel.averages(body, values.grid)
    return out.view(B, H, S, D).to(q.dtype)


def _key_scores(rows: Tensor, keys: Source, kernel: Kernel) -> list[Tensor]:
    n_sink, n_body, _ = keys.parts
    exact = [(keys.sink, range(n_sink)), (keys.window, range(n_sink + n_body, keys.length))]
    sink, window = (rows @ (x if keys.rope is None else keys.rope.apply(x, at)).to(rows.dtype).mT for x, at in exact)
    if not n_body:
        return [sink, window]
    if keys.rope is None:
        return [sink, kernel.scores(rows, keys.grid), window]
    return [sink, kernel.rotated_scores(rows, keys.grid, keys.rope, n_sink), window]
