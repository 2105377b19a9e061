"""Broken caches: what is handed over, what a call sees; each by one mistake, and the laws that must notice."""

from dataclasses import replace

import torch

from kvmini import QuantizedKVCache, Rope
from kvmini.attention import View, attention
from kvmini.kernels.source import Source
from kvmini.store import QuantizedStore


def in_a_cache(store):
    """The quantized cache, made of these stores."""
    class Cache(QuantizedKVCache):
        __doc__ = store.__doc__

        def __init__(self, n_layers, rope, policy):
            self.rope, self.pre_rope = rope, policy.pre_rope
            self.keys = [store(policy.key, n, policy.sinks, policy.prefill) for n in range(n_layers)]
            self.values = [store(policy.value, n, policy.sinks, policy.prefill) for n in range(n_layers)]
    Cache.__name__ = store.__name__
    return Cache


class Store(QuantizedStore):
    """Nothing wrong: the store, with the number of tokens that are due in a method of its own."""

    def _due(self):
        return max(0, self.window.shape[-2] - self.residual) // self.flush * self.flush

    def _hand_over(self):
        if n := self._due():
            self.body = self.quantizer.cat(self.body, self.quantizer.quantize(self.window[..., :n, :]))
            self.window = self.window[..., n:, :].clone()


# --- what is handed over, and when

@in_a_cache
class SingleTokens(Store):
    """Keys go into per_channel groups one at a time: a group of one number is exact (VeloxQuant-MLX #162)."""

    def __init__(self, side, layer, sinks, prefill):
        super().__init__(side, layer, sinks, prefill)
        if self.quantizer.axis == "per_channel":
            self.quantizer, self.flush = replace(self.quantizer, group_size=1), 1


@in_a_cache
class GroupsOfOne(Store):
    """The same, G at a time: each token of a per_channel block is a group of its own."""

    def __init__(self, side, layer, sinks, prefill):
        super().__init__(side, layer, sinks, prefill)
        if self.quantizer.axis == "per_channel":
            self.quantizer = replace(self.quantizer, group_size=1)


@in_a_cache
class PromptAtOnce(Store):
    """The first call is quantized whole, window or not (transformers #34189, #35185)."""

    def _due(self):
        return super()._due() if self.body.n_tokens else self.window.shape[-2] // self.flush * self.flush


@in_a_cache
class QuantizedAgain(Store):
    """Each flush dequantizes the body into the model's float16 and quantizes all of it again (transformers)."""

    def _hand_over(self):
        if n := self._due():
            body = replace(self.source(), sink=self.sink[..., :0, :], window=self.sink[..., :0, :]).read()
            x = torch.cat([body.half().to(self.window.dtype), self.window[..., :n, :]], dim=-2)
            self.body, self.window, self.dropped = self.quantizer.quantize(x), self.window[..., n:, :].clone(), []


@in_a_cache
class JudgedByTheCall(Store):
    """What leaves the window is judged by the size of the call, 1 while decoding (VeloxQuant-MLX #86)."""

    def append(self, x):
        self.size = x.shape[-2]
        return super().append(x)

    def _due(self):
        return max(0, self.size - self.residual) // self.flush * self.flush


@in_a_cache
class OneFlushACall(Store):
    """A call hands over once, however long it is (KIVI pops one value token a step)."""

    def _due(self):
        return min(super()._due(), self.flush)


@in_a_cache
class WindowDrains(Store):
    """A full window is handed over whole: recent tokens drop to none instead of sliding (InnerQ, transformers)."""

    def _due(self):
        return self.window.shape[-2] // self.flush * self.flush if super()._due() else 0


@in_a_cache
class FlushIgnored(Store):
    """Blocks go as soon as they are whole, whatever flush_length says."""

    def __init__(self, side, layer, sinks, prefill):
        super().__init__(side, layer, sinks, prefill)
        self.flush = self.quantizer.block


@in_a_cache
class SinksAtTheEnd(Store):
    """The prompt's last tokens are kept as its sinks."""

    def _take_in(self, x):
        room = min(self.sinks - self.sink.shape[-2], x.shape[-2])
        self.sink = torch.cat([self.sink, x[..., x.shape[-2] - room:, :]], dim=-2)
        self.window = torch.cat([self.window, x[..., :x.shape[-2] - room, :]], dim=-2)


# --- what a call sees

@in_a_cache
class HandedOverFirst(Store):
    """A step hands over before it attends, and sees its own token quantized (KIVI, Algorithm 1)."""

    def append(self, x):
        view = super().append(x)
        return View(self.read()) if x.shape[-2] == 1 else view


@in_a_cache
class PromptSeesItselfQuantized(Store):
    """The prompt attends to what was stored of it."""

    def append(self, x):
        view = super().append(x)
        return View(self.read()) if self.prefill == "exact" else view


@in_a_cache
class StreamedOffByOne(Store):
    """A query counts itself among the tokens before it."""

    def append(self, x):
        first, end = self.length, self.sinks + self._n_live
        view = super().append(x)
        already = first + 1 + torch.arange(x.shape[-2])
        boundary = end + (already - end - self.residual).clamp(min=0) // self.flush * self.flush
        return replace(view, boundary=boundary) if getattr(view, "boundary", None) is not None else view


@in_a_cache
class BodyReadsAsZeros(Store):
    """Attention reads the body from a buffer that nobody fills; only `read` is right."""

    def append(self, x):
        seen = super().append(x)
        if not isinstance(seen, Source):
            return seen
        zeros = {name: torch.zeros_like(part) for name, part in seen.body.parts.items()}
        return replace(seen, body=replace(seen.body, parts=zeros))


class PositionsOfTheCall(QuantizedKVCache):
    """Keys and queries are turned to their place in the call, not in the sequence."""

    class FromZero(Rope):
        def apply(self, x, positions):
            return super().apply(x, range(len(positions)))

    def __init__(self, n_layers, rope, policy):
        super().__init__(n_layers, self.FromZero(rope.head_dim, rope.base), policy)


class QueriesFromZero(QuantizedKVCache):
    """Keys are in place, and queries start at 0."""

    def attend(self, layer, q, k, v, layer_input=None):
        first, S = self.values[layer].length, q.shape[-2]
        return attention(self.rope.apply(q, range(S)), *self.append(layer, k, v), first)


class TurnedTwice(QuantizedKVCache):
    """Keys stored before RoPE come from a projection that has turned them already."""

    def append(self, layer, k, v):
        first = self.values[layer].length
        return super().append(layer, self.rope.apply(k, range(first, first + k.shape[-2])) if self.pre_rope else k, v)


class TurnedInPlace(QuantizedKVCache):
    """The caller's keys are turned, too."""

    def append(self, layer, k, v):
        first = self.values[layer].length
        views = super().append(layer, k, v)
        k.copy_(self.rope.apply(k, range(first, first + k.shape[-2])))
        return views


class LayersShareAStore(QuantizedKVCache):
    """[store] * n_layers."""

    def __init__(self, n_layers, rope, policy):
        super().__init__(n_layers, rope, policy)
        self.keys, self.values = self.keys[:1] * n_layers, self.values[:1] * n_layers


KILLED_BY = {
    SingleTokens: "L13", GroupsOfOne: "L13", PromptAtOnce: "L13", QuantizedAgain: "L21", JudgedByTheCall: "L13",
    OneFlushACall: "L12", WindowDrains: "L13", FlushIgnored: "L13", SinksAtTheEnd: "L13", HandedOverFirst: "L15",
    PromptSeesItselfQuantized: "L15", StreamedOffByOne: "L15", BodyReadsAsZeros: "L15", PositionsOfTheCall: "L12 L13",
    QueriesFromZero: "L15", TurnedTwice: "L13", TurnedInPlace: "L13", LayersShareAStore: "L21",
}
