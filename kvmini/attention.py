"""Attention, in the open: scores, causal mask, softmax, weighted sum.

This is where keys and values are consumed, so this is where their errors are judged. Query heads come
in groups that share one key/value head (grouped-query attention); nothing is repeated in memory.

A `View` is one side (keys or values) as the queries of one call see it. It exists because a query of a
long call must be able to see a token exactly although a later query of the same call sees it stored.
Next file: `side.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

CHUNK = 256  # queries whose scores are held at once: memory stays linear in the context


@dataclass(frozen=True, eq=False)
class View:
    """Keys or values of all T live tokens: query i sees `stored[j]` for j < boundary[i], else `tokens[j]`.

    Shapes:
        tokens, stored `[B, Hkv, T, D]`; boundary `[S]`. stored and boundary are None where all queries of
        the call see the same tokens, which is the common case.
    """

    tokens: Tensor
    stored: Tensor | None = None
    boundary: Tensor | None = None

    def map(self, f: Callable[[Tensor], Tensor]) -> "View":
        """The view with f applied to its tensors."""
        return replace(self, tokens=f(self.tokens), stored=None if self.stored is None else f(self.stored))

    def rows(self, start: int, stop: int, n_tokens: int) -> "View":
        """The view of queries start .. stop - 1, who see the first n_tokens only."""
        view = self.map(lambda x: x[..., :n_tokens, :])
        return view if self.boundary is None else replace(view, boundary=self.boundary[start:stop])

    def uses_stored(self) -> Tensor:
        """Which (query, token) pairs see the stored token, bool `[S, T]`."""
        return torch.arange(self.tokens.shape[-2], device=self.boundary.device) < self.boundary[:, None]


def attention_weights(q: Tensor, keys: View, first: int) -> Tensor:
    """Softmax over the scores of rotated queries at positions first .. first + S - 1.

    Shapes:
        q `[B, H, S, D]`, keys of `[B, Hkv, T, D]` -> `[B, H, S, T]`, zero where token j > first + i.
    """
    B, H, S, D = q.shape
    T = keys.tokens.shape[-2]

    q = q.reshape(B, keys.tokens.shape[1], -1, D) / D**0.5  # the H / Hkv heads that share a key head, one after another

    def scores(k: Tensor) -> Tensor:
        return (q @ k.mT).view(B, H, S, T)

    score = scores(keys.tokens)
    if keys.stored is not None:
        score = torch.where(keys.uses_stored(), scores(keys.stored), score)
    visible = torch.arange(T, device=q.device) <= first + torch.arange(S, device=q.device)[:, None]
    score = score.masked_fill(~visible, -torch.inf)
    return torch.softmax(score, dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)


def weighted_sum(weights: Tensor, values: View) -> Tensor:
    """The attention output: values averaged by the weights.

    Shapes:
        weights `[B, H, S, T]`, values of `[B, Hkv, T, D]` -> `[B, H, S, D]`
    """
    B, H, S, T = weights.shape

    def average(w: Tensor, v: Tensor) -> Tensor:
        return (w.reshape(B, v.shape[1], -1, T) @ v).view(B, H, S, -1)

    if values.stored is None:
        return average(weights, values.tokens)
    uses_stored = values.uses_stored()
    return average(weights * ~uses_stored, values.tokens) + average(weights * uses_stored, values.stored)


def attention(q: Tensor, keys: View, values: View, first: int) -> Tensor:
    """Causal grouped-query attention of rotated queries at positions first .. first + S - 1.

    Shapes:
        q `[B, H, S, D]`; keys, values of `[B, Hkv, T, D]`, T = first + S -> `[B, H, S, D]`
    Example:
        >>> q, k, v = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 1, 8), torch.ones(1, 2, 1, 8)
        >>> attention(q, View(k), View(v), first=0).unique().tolist()    # one token: its value
        [1.0]
    """
    S, outputs = q.shape[-2], []
    for start in range(0, S, CHUNK):
        stop = min(S, start + CHUNK)
        seen = first + stop
        weights = attention_weights(q[..., start:stop, :], keys.rows(start, stop, seen), first + start)
        outputs.append(weighted_sum(weights, values.rows(start, stop, seen)))
    return torch.cat(outputs, dim=-2)
