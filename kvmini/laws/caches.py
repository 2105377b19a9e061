"""Laws of caches: what is exact when, what is stored, in how many bytes, and what a call sees.

A cache under test is `factory(n_layers, rope, policy)`, with `append(layer, k, v)` and `read(layer)`, and what more
the laws need. Next file: `machine.py`, any sequence of calls.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from kvmini import axes
from kvmini.cache import CachePolicy
from kvmini.laws.consumers import exact_attention
from kvmini.laws.law import Broken, called, demand, law, within
from kvmini.laws.memory import reachable_nbytes
from kvmini.laws.offers import LAYERS, CacheOffer
from kvmini.rope import Rope
from kvmini.side import Side


@dataclass(frozen=True, eq=False)
class History:
    """A policy, tokens, and the sizes of the calls they came in."""

    factory: Callable
    policy: CachePolicy
    sizes: tuple[int, ...]
    batch: int
    dtype: torch.dtype
    seed: int

    def __str__(self) -> str:
        sides = ", ".join(f"{name}: {side.quantizer.axis} {side.quantizer.n_bits} bits G {side.quantizer.group_size} "
                          f"R {side.residual_length} F {side.flush_length or side.quantizer.block}"
                          for name, side in (("keys", self.policy.key), ("values", self.policy.value)))
        rope = ", pre-RoPE" if self.policy.pre_rope else ""
        return (f"{sides}, sinks {self.policy.sinks}{rope}; batch {self.batch}, {self.dtype}, "
                f"{self.n} tokens in calls of {list(self.sizes)}")

    @property
    def n(self) -> int:
        return sum(self.sizes)

    @cached_property
    def rope(self) -> Rope:
        return Rope(2 * self.policy.key.quantizer.group_size)

    @cached_property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """q `[B, 4, n, D]`, k and v `[B, 2, n, D]`, unrotated; one channel of k stands out."""
        random = torch.Generator().manual_seed(self.seed)
        q, k, v = (torch.randn(self.batch, heads, self.n, self.rope.head_dim, generator=random, dtype=torch.float64)
                   for heads in (4, 2, 2))
        k[..., 3] *= 20
        return q.to(self.dtype), k.to(self.dtype), v.to(self.dtype)

    @property
    def exact(self) -> tuple[Tensor, Tensor]:
        """Keys, rotated, and values, as a cache that quantizes nothing would read them."""
        _, k, v = self.tokens
        return self.rope.apply(k, range(self.n)), v

    def sides(self) -> list[tuple[str, Side]]:
        return [("keys", self.policy.key), ("values", self.policy.value)]

    def cache(self) -> Any:
        return called(self, "the factory", self.factory, LAYERS, self.rope, self.policy)

    def filled(self, sizes: tuple[int, ...] | None = None) -> Any:
        """A cache that took the tokens in calls of these sizes."""
        cache = self.cache()
        for part in zip(*(x.split(list(sizes or self.sizes), dim=-2) for x in self.tokens[1:]), strict=True):
            give(self, "append", cache.append, part)
        return cache

    def attended(self, sizes: tuple[int, ...]) -> Tensor:
        """What attention gave, in calls of these sizes."""
        cache = self.cache()
        parts = zip(*(x.split(list(sizes), dim=-2) for x in self.tokens), strict=True)
        return torch.cat([give(self, "attend", cache.attend, part) for part in parts], dim=-2)


def give(case, what: str, method: Callable, part: tuple[Tensor, ...]) -> Any:
    """What layer 0 answers to these tokens. The other layer takes their negatives; both leave what they are given as
    it is, and cannot rely on it afterwards."""
    answers = []
    for layer in range(LAYERS):
        given = [x.clone() if layer == 0 else -x for x in part]
        answers.append(called(case, what, method, layer, *(lent := [x.clone() for x in given])))
        for x, before in zip(lent, given, strict=True):
            within(str(case), f"what was given to {what}, afterwards,", x, before)
            x.zero_()
    return answers[0]


@st.composite
def histories(draw, offer: CacheOffer, variant: str, dtype: torch.dtype | None = None, least: int = 1) -> History:
    """Calls of 1 to 40 tokens, often single ones, of at most about 100 in all."""
    policy = draw(st.sampled_from(offer.policies))
    sizes = draw(st.lists(st.just(1) | st.integers(1, 40), min_size=least, max_size=5))
    return History(offer.factory, policy, tuple(sizes), draw(st.integers(1, 2)),
                   dtype or draw(st.sampled_from([torch.float32, torch.float64])), draw(st.integers(0, 999)))


def handed(n: int, side: Side, sinks: int) -> int:
    """The first token that is still in the window, of n tokens: sinks + floor(max(0, n - sinks - R) / F) F."""
    flush = side.flush_length or side.quantizer.block
    return sinks + max(0, n - sinks - side.residual_length) // flush * flush


@law("L12", "cache", histories, needs=("append", "read"))
def calls_do_not_matter(history: History) -> None:
    """Cutting the same keys and values into calls differently gives the same cache, to the last bit."""
    whole = history.filled((history.n,)).read(0)
    for sizes in (history.sizes, (1,) * history.n):
        for name, got, expected in zip(("key", "value"), history.filled(sizes).read(0), whole, strict=True):
            within(history, f"the {name} read after calls of {list(sizes)[:12]}, against one call,", got, expected)


@law("L13", "cache", histories, needs=("append", "read"))
def windows_are_exact(history: History) -> None:
    """Sinks, and tokens from handed(n) = sinks + floor(max(0, n - sinks - R) / F) F on, are read bit exact."""
    for (name, side), got, exact in zip(history.sides(), history.filled().read(0), history.exact, strict=True):
        end, token = handed(history.n, side, history.policy.sinks), torch.arange(history.n)[:, None]
        stored = (token >= history.policy.sinks) & (token < end)
        within(history, f"the exact part of the {name} read (body ends at {end})", got, exact,
               torch.where(stored.expand(exact.shape), torch.inf, 0.0))


@law("L13", "cache", histories, needs=("append", "read"))
def older_tokens_are_quantized(history: History) -> None:
    """Every token between sinks and handed(n) is really quantized: off, and by at most a step of its own group."""
    for (name, side), got, exact in zip(history.sides(), history.filled().read(0), history.exact, strict=True):
        sinks = history.policy.sinks
        body, quantizer = slice(sinks, max(sinks, handed(history.n, side, sinks))), side.quantizer
        got, exact = got[..., body, :], exact[..., body, :]
        demand(history, (got != exact).any(-1), lambda i, name=name: (
            f"(row, head, token of the body) of the {name} is exact, and claimed to be quantized"))
        unrotated = history.policy.pre_rope and name == "keys"
        x = history.tokens[1][..., body, :] if unrotated else exact
        groups = axes.split(x.double(), quantizer.axis, quantizer.group_size)
        step = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / (2**quantizer.n_bits - 1)
        step = axes.join(step.expand_as(groups), quantizer.axis, x.shape)
        if unrotated:  # the error of a pair is turned with it
            step = torch.hypot(*step.chunk(2, dim=-1)).repeat(1, 1, 1, 2)
        within(history, f"the body of the {name} read", got, exact, step)


@law("L13", "cache", histories, needs=("append", "read", "nbytes"))
def the_body_is_what_its_quantizer_gives(history: History) -> None:
    """The body is read as the policy's quantizer gives it back from those tokens in one piece, to the last bit."""
    for (name, side), got, exact in zip(history.sides(), history.filled().read(0), history.exact, strict=True):
        sinks = history.policy.sinks
        body = range(sinks, max(sinks, handed(history.n, side, sinks)))
        unrotated = history.policy.pre_rope and name == "keys"
        x = (history.tokens[1] if unrotated else exact)[..., body.start:body.stop, :]
        x_hat = side.quantizer.dequantize(side.quantizer.quantize(x))
        x_hat = history.rope.apply(x_hat, body) if unrotated else x_hat
        within(history, f"the body of the {name} read", got[..., body.start:body.stop, :], x_hat)


def body_nbytes(side: Side, n_tokens: int, D: int) -> int:
    """Bytes of the packed body of one head: codes, and a float16 scale and minimum for each group."""
    quantizer = side.quantizer
    groups = n_tokens * D // quantizer.group_size
    return n_tokens * -(-D * quantizer.n_bits // 8) + 4 * groups


@law("L14", "cache", histories, needs=("append", "nbytes"))
def bytes_are_the_closed_form(history: History) -> None:
    """`nbytes` is, to the byte, that of the exact tokens, the codes, and a float16 scale and minimum a group."""
    D, expected = history.rope.head_dim, 0
    for _, side in history.sides():
        body = max(0, handed(history.n, side, history.policy.sinks) - history.policy.sinks)
        exact = (history.n - body) * D * history.dtype.itemsize
        expected += LAYERS * 2 * history.batch * (exact + body_nbytes(side, body, D))
    if (got := history.filled().nbytes) != expected:
        raise Broken(f"{history}: nbytes is {got}, expected {expected}")


@law("L14", "cache", histories, needs=("append", "capacity_nbytes", "nbytes"))
def nothing_else_stays_alive(history: History) -> None:
    """`capacity_nbytes` is the storage that can be reached from the cache: at least `nbytes`, and no float copy, so at
    most twice that and eight tokens a side for growth."""
    cache = history.filled()
    held = reachable_nbytes(cache)
    room = LAYERS * 2 * 2 * history.batch * 8 * history.rope.head_dim * history.dtype.itemsize
    if not cache.nbytes <= cache.capacity_nbytes == held <= 2 * cache.nbytes + room:
        raise Broken(f"{history}: nbytes {cache.nbytes}, capacity_nbytes {cache.capacity_nbytes}, but {held} bytes of "
                     "arrays can be reached from the cache")


@law("L15", "cache", lambda offer, variant: histories(offer, variant, dtype=torch.float64), needs=("attend",))
def windows_over_everything_are_exact(history: History) -> None:
    """A cache that keeps everything exact gives the output of attention without a cache."""
    wide = [replace(side, residual_length=history.n) for _, side in history.sides()]
    history = replace(history, policy=replace(history.policy, key=wide[0], value=wide[1]))
    k, v = history.exact
    expected, bound = exact_attention(history.rope.apply(history.tokens[0], range(history.n)), k, v, 2.0**-52)
    within(history, "the output", history.attended(history.sizes), expected, bound)


@law("L15", "cache", lambda offer, variant: histories(offer, variant, dtype=torch.float64), needs=("attend",))
def streamed_is_one_by_one(history: History) -> None:
    """With prefill "streamed", calls of any size give the output of one token at a time, up to float64 rounding."""
    history = replace(history, policy=replace(history.policy, prefill="streamed"))
    k, v = history.exact
    _, bound = exact_attention(history.rope.apply(history.tokens[0], range(history.n)), 2 * k, 2 * v, 2.0**-52)
    within(history, "the output", history.attended(history.sizes), history.attended((1,) * history.n), 2 * bound)


@law("L15", "cache", lambda offer, variant: histories(offer, variant, dtype=torch.float64), needs=("attend", "append"))
def a_prefill_sees_itself_exactly(history: History) -> None:
    """With prefill "exact", a first call of any size gives the output of attention without a cache."""
    k, v = history.exact
    expected, bound = exact_attention(history.rope.apply(history.tokens[0], range(history.n)), k, v, 2.0**-52)
    within(history, "the output", history.attended((history.n,)), expected, bound)


@law("L15", "cache", lambda offer, variant: histories(offer, variant, dtype=torch.float64), needs=("attend", "append"))
def a_step_attends_to_what_is_read(history: History) -> None:
    """One token attends to what `read` gave before it, and to itself exactly."""
    cache, n = history.cache(), history.n - 1
    q, k, v = history.tokens
    if n:
        give(history, "append", cache.append, (k[..., :n, :], v[..., :n, :]))
        k_before, v_before = called(history, "read", cache.read, 0)
    else:
        k_before, v_before = k[..., :0, :], v[..., :0, :]
    q, k, v = (x[..., n:, :] for x in (q, k, v))
    q_here, k_here = (history.rope.apply(x, range(n, n + 1)) for x in (q, k))
    expected, bound = exact_attention(q_here, torch.cat([k_before, k_here], -2), torch.cat([v_before, v], -2), 2.0**-52)
    within(history, "the output of a step", give(history, "attend", cache.attend, (q, k, v)), expected, bound)
