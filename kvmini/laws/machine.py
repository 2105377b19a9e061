"""L21: any sequence of calls on a cache agrees with a plain model of it.

The model holds what was appended, exactly, and one number a side: where the body ends. Next file: `public.py`.
"""

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import Tensor

from kvmini.laws.caches import History, body_nbytes, give
from kvmini.laws.law import LAWS, Broken, Law, called, within
from kvmini.laws.offers import LAYERS, CacheOffer


class CacheMachine(RuleBasedStateMachine):
    """append, crop, reorder and read, in any order."""

    offer: CacheOffer

    @initialize(data=st.data(), batch=st.integers(1, 3), seed=st.integers(0, 999))
    def begin(self, data, batch, seed):
        policy = data.draw(st.sampled_from(self.offer.policies))
        self.history = History(self.offer.factory, policy, (), batch, torch.float64, seed)
        self.cache = self.history.cache()
        self.done: list[str] = []
        self.random = torch.Generator().manual_seed(seed)
        self.k = self.v = torch.empty(batch, 2, 0, self.history.rope.head_dim, dtype=torch.float64)
        self.end = [policy.sinks, policy.sinks]  # where the body ends; sinks are before it, the window behind
        self.seen = [self.k, self.v]  # what was read last

    @property
    def n(self) -> int:
        return self.k.shape[-2]

    @rule(S=st.just(1) | st.integers(1, 40))
    def append(self, S):
        k, v = (torch.randn(*self.k.shape[:2], S, self.k.shape[3], generator=self.random, dtype=torch.float64)
                for _ in range(2))
        self.k, self.v = torch.cat([self.k, k], dim=-2), torch.cat([self.v, v], dim=-2)
        for i, side in enumerate((self.history.policy.key, self.history.policy.value)):
            flush = side.flush_length or side.quantizer.block
            self.end[i] += max(0, self.n - self.end[i] - side.residual_length) // flush * flush
        self._do(f"append({S})", lambda: give(self, "append", self.cache.append, (k, v)))

    @precondition(lambda self: self.n and "crop" in self.offer.shows)
    @rule(data=st.data())
    def crop(self, data):
        n = data.draw(st.integers(0, self.n))
        self.k, self.v = self.k[..., :n, :], self.v[..., :n, :]
        self.end = [max(self.history.policy.sinks, min(end, n)) for end in self.end]
        self.seen = [x[..., :n, :] for x in self.seen]
        self._do(f"crop({n})", self.cache.crop, n)

    @precondition(lambda self: self.n and "reorder" in self.offer.shows)
    @rule(data=st.data())
    def reorder(self, data):
        B = self.k.shape[0]
        rows = data.draw(st.lists(st.integers(0, B - 1), min_size=1, max_size=3))
        self.k, self.v = self.k[rows], self.v[rows]
        self.seen = [x[rows] for x in self.seen]
        self._do(f"reorder({rows})", self.cache.reorder, rows)

    def _do(self, text: str, method, *args) -> None:
        """Do it, then look at everything that can be seen."""
        self.done.append(text)
        called(self, text, method, *args)
        if self.cache.length != self.n:
            raise Broken(f"{self}: length is {self.cache.length}, expected {self.n}")
        if "nbytes" in self.offer.shows and bool(self.cache.nbytes) != bool(self.n):
            raise Broken(f"{self}: {self.n} tokens take {self.cache.nbytes} bytes")
        if "nbytes" in self.offer.shows and self.cache.nbytes > self._most():
            raise Broken(f"{self}: {self.n} tokens take {self.cache.nbytes} bytes, at most {self._most()} would do")
        if self.n:
            exact = self.history.rope.apply(self.k, range(self.n)), self.v
            got = called(self, "read", self.cache.read, 0)
            for i, name in enumerate(("keys", "values")):
                self._look(i, name, got[i], exact[i])
            self.seen = list(got)

    def _most(self) -> int:
        """Bytes of the live tokens, and of one block that each crop so far may have cut."""
        (B, heads, _, D), sinks, most = self.k.shape, self.history.policy.sinks, 0
        crops = sum(text.startswith("crop") for text in self.done)
        for end, (_, side) in zip(self.end, self.history.sides(), strict=True):
            block, body = side.quantizer.block, max(0, min(end, self.n) - sinks)
            slots = -(-(body + crops * (block - 1)) // block) * block
            most += LAYERS * B * heads * ((self.n - body) * D * self.k.itemsize + body_nbytes(side, slots, D))
        return most

    def _look(self, i: int, name: str, got: Tensor, exact: Tensor) -> None:
        """Exact tokens are exact, those of the body are not, and what was quantized at the last look has not moved."""
        token = torch.arange(self.n)
        in_body = (token >= self.history.policy.sinks) & (token < self.end[i])
        within(self, f"an exact token of the {name}", got, exact, _where(in_body, exact))
        is_exact = in_body & (got == exact).all(-1).any(1).any(0)
        if is_exact.any():
            token = int(is_exact.nonzero()[0])
            raise Broken(f"{self}: token {token} of the {name} is exact, and claimed to be quantized")
        seen = self.seen[i]
        before = seen.shape[-2]
        stored = in_body[:before] & (seen != exact[..., :before, :]).any(-1).any(1).any(0)
        within(self, f"a token of the {name} quantized before", got[..., :before, :], seen, _where(~stored, seen))

    def __str__(self) -> str:
        start = str(self.history).split(";")[0]
        return f"{start}; batch {self.history.batch}; {', '.join(self.done)}"


def _where(free: Tensor, like: Tensor) -> Tensor:
    """The bound of tokens [T] that may be anything (inf) or must be equal (0), for x's shape."""
    return torch.where(free[:, None].expand(like.shape), torch.inf, 0.0)


def agrees_with_a_model(offer: CacheOffer, variant: str, profile) -> None:
    """Any sequence of append, crop, reorder and read agrees with a plain model: lengths, which tokens are exact, and
    that no token is quantized twice. After a crop to n inside the body, handed(m) counts on from n."""
    machine = type("CacheMachine", (CacheMachine,), {"offer": offer})
    run_state_machine_as_test(machine, settings=profile)


LAWS.append(Law("L21", "cache", "agrees_with_a_model", " ".join(agrees_with_a_model.__doc__.split()),
                ("append", "read", "length"), None, agrees_with_a_model))
