"""Broken caches: bytes, crop and reorder, each by one mistake, and the laws that must notice."""

from mutant_caches import Store, in_a_cache

from kvmini import QuantizedKVCache
from kvmini.kernels.source import Source


@in_a_cache
class WindowIsAView(Store):
    """The window is a slice, and what was handed over stays alive behind it."""

    def _hand_over(self):
        if n := self._due():
            window = self.window
            super()._hand_over()
            self.window = window[..., n:, :]


@in_a_cache
class KeepsTheCallersTensor(Store):
    """The first tokens are not copied: they change when their owner reuses the buffer."""

    def _take_in(self, x):
        first = not self.sinks and not self.window.shape[-2]
        super()._take_in(x)
        if first:
            self.window = x


@in_a_cache
class KeepsWhatItRead(Store):
    """The dequantized body is kept for the next step."""

    def append(self, x):
        seen = super().append(x)
        self.copy = seen.read() if isinstance(seen, Source) else seen.tokens
        return seen


class WindowNotBilled(QuantizedKVCache):
    """nbytes is that of the bodies."""

    nbytes = property(lambda self: sum(body.nbytes for body in self._bodies()))


class HeadsRepeated(QuantizedKVCache):
    """Key heads are repeated for the queries before they are stored (turboquant-vllm #67)."""

    def append(self, layer, k, v):
        views = super().append(layer, *(x.repeat_interleave(2, dim=1) for x in (k, v)))
        return tuple(view.map(lambda x: x[:, ::2]) for view in views)

    def read(self, layer):
        return tuple(x[:, ::2] for x in super().read(layer))


# --- crop and reorder

@in_a_cache
class ReorderMovesTheWindow(Store):
    """Beams: the exact part follows, the stored part stays."""

    def reorder(self, rows):
        self.sink, self.window = self.sink[rows], self.window[rows]


@in_a_cache
class CropStartsAgain(Store):
    """Crop reads, empties, and appends: what was quantized is quantized again, in other groups."""

    def crop(self, n):
        x = self.read()[..., :n, :]
        super().crop(0)
        if n:
            self.append(x)


@in_a_cache
class CropToWholeBlocks(Store):
    """A group that crop cuts is kept, dropped tokens and all."""

    def crop(self, n):
        super().crop(n)
        self.dropped = []


@in_a_cache
class CropFreesNothing(Store):
    """Crop marks tokens as dropped, and keeps their bytes."""

    def crop(self, n):
        body, older = self.body, self.dropped
        if n and self.sink.shape[-2] < n < self.sink.shape[-2] + self._n_live:
            start = int(self._live_slots()[n - self.sink.shape[-2] - 1]) + 1
            super().crop(n)
            self.body = body
            self.dropped = [*(cut for cut in older if cut.stop <= start), range(start, body.n_tokens)]
        else:
            super().crop(n)


@in_a_cache
class CropsAtTheWrongEnd(Store):
    """Crop keeps the last tokens of the window."""

    def crop(self, n):
        window = self.window
        super().crop(n)
        if n and self.window.shape[-2]:
            self.window = window[..., -self.window.shape[-2]:, :].clone()


@in_a_cache
class CropForgetsWhatItDropped(Store):
    """A second crop forgets the gap of the first."""

    def crop(self, n):
        older = self.dropped
        super().crop(n)
        self.dropped = [cut for cut in self.dropped if cut not in older]


KILLED_BY = {
    WindowIsAView: "L14", KeepsTheCallersTensor: "L13", KeepsWhatItRead: "L14", WindowNotBilled: "L14",
    HeadsRepeated: "L14", ReorderMovesTheWindow: "L21", CropStartsAgain: "L21", CropToWholeBlocks: "L21",
    CropFreesNothing: "L21", CropsAtTheWrongEnd: "L21", CropForgetsWhatItDropped: "L21",
}
