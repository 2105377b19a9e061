"""Broken attention kernels, each by one mistake that people make, and the law that must notice."""

from dataclasses import replace
from math import sqrt

import torch


def heads(x, q):
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def visible(S, T):
    return torch.arange(T) <= T - S + torch.arange(S)[:, None]


def scores(q, k):
    """Masked scores; nothing wrong."""
    return (q @ heads(k, q).mT / sqrt(q.shape[-1])).masked_fill(~visible(q.shape[-2], k.shape[-2]), -torch.inf)


def attend(q, k, v):
    """Nothing wrong."""
    return scores(q, k).softmax(-1) @ heads(v, q)


def not_divided(q, keys, values):
    """Scores without 1/sqrt(D)."""
    return attend(q * sqrt(q.shape[-1]), keys.read(), values.read())


def divided_in_place(q, keys, values):
    """The query is divided by sqrt(D) where it lies: its owner finds it changed."""
    return attend(q.div_(sqrt(q.shape[-1])) * sqrt(q.shape[-1]), keys.read(), values.read())


def square_mask(q, keys, values):
    """A later chunk is masked as if it were the first: j <= i."""
    k, v = keys.read(), values.read()
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return (q @ heads(k, q).mT / sqrt(q.shape[-1])).masked_fill(~seen, -torch.inf).softmax(-1) @ heads(v, q)


def last_token_masked(q, keys, values):
    """j < position: a query does not see itself."""
    k = keys.read()
    seen = visible(q.shape[-2], k.shape[-2]).roll(-1, -1) & (torch.arange(k.shape[-2]) < k.shape[-2] - 1)
    return scores(q, k).masked_fill(~seen, -torch.inf).softmax(-1) @ heads(values.read(), q)


def zero_for_masked(q, keys, values):
    """The mask is multiplied: a hidden token has score 0, not none."""
    k = keys.read()
    seen = visible(q.shape[-2], k.shape[-2])
    return (q @ heads(k, q).mT / sqrt(q.shape[-1]) * seen).softmax(-1) @ heads(values.read(), q)


def heads_interleaved(q, keys, values):
    """Query head h reads key head h mod Hkv, not h // (H / Hkv)."""
    k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (keys.read(), values.read()))
    return attend(q, k, v)


def two_softmaxes(q, keys, values):
    """Stored and recent tokens are each weighted to 1, and added."""
    k, v, n = keys.read(), values.read(), keys.parts[0] + keys.parts[1]
    s = scores(q, k)
    parts = [s[..., part].softmax(-1).nan_to_num() @ heads(v, q)[..., part, :] for part in (slice(n), slice(n, None))]
    return parts[0] + parts[1]


def first_scale(q, keys, values):
    """One scale is folded into the query: that of the first group along the tokens."""
    stored = keys.body
    first = {"scale": stored.scale[..., :1, :].expand_as(stored.scale)}
    return attend(q, replace(keys, body=replace(stored, parts={**stored.parts, **first})).read(), values.read())


def minimum_forgotten(q, keys, values):
    """code * scale without its minimum, which "cancels in the softmax": not for values."""
    stored = values.body
    minimum = {} if stored.minimum is None else {"minimum": torch.zeros_like(stored.minimum)}
    return attend(q, keys.read(), replace(values, body=replace(stored, parts={**stored.parts, **minimum})).read())


def half_precision(q, keys, values):
    """Scores and sums in float16."""
    return attend(q.half(), keys.read().half(), values.read().half()).to(q.dtype)


def exp_without_max(q, keys, values):
    """exp(score) / sum exp(score): inf / inf for large keys."""
    weights = scores(q, keys.read()).exp()
    return weights / weights.sum(-1, keepdim=True) @ heads(values.read(), q)


def window_forgotten(q, keys, values):
    """Sink and body alone are read as soon as there is a body."""
    k, v = (x.read()[..., :sum(x.parts[:2]) if x.parts[1] else None, :] for x in (keys, values))
    T = min(k.shape[-2], v.shape[-2])
    return (q @ heads(k, q)[..., :T, :].mT / sqrt(q.shape[-1])).softmax(-1) @ heads(v, q)[..., :T, :]


def sink_forgotten(q, keys, values):
    """The first tokens are not read where the body can be read alone."""
    n = keys.parts[0] if keys.parts[0] == values.parts[0] and keys.length > keys.parts[0] + q.shape[-2] else 0
    return attend(q, keys.read()[..., n:, :], values.read()[..., n:, :])


def not_turned(q, keys, values):
    """Keys that were stored before RoPE meet the query as they are."""
    return attend(q, replace(keys, rope=None).read(), values.read())


def turned_from_zero(q, keys, values):
    """The body's first token is turned as if it stood at position 0, although sinks stand before it."""
    k = keys.read()
    if keys.rope is not None:
        n, body = keys.parts[0], keys.quantizer.dequantize(keys.body)
        k = torch.cat([k[..., :n, :], keys.rope.apply(body, range(body.shape[-2])), k[..., n + body.shape[-2]:, :]], -2)
    return attend(q, k, values.read())


KILLED_BY = dict.fromkeys([
    not_divided, divided_in_place, square_mask, last_token_masked, zero_for_masked, heads_interleaved, two_softmaxes,
    first_scale, minimum_forgotten, half_precision, exp_without_max, window_forgotten, sink_forgotten, not_turned,
    turned_from_zero], "L16")
