"""The life of a token on one side (keys or values) of one layer: sink or window, then packed body.

    | sinks, exact | packed body: codes, scales, minimums | recent window, exact |
                                                          ^ handed(n)

A side has a store in every layer: `ExactStore` keeps everything, `QuantizedStore` is the picture above.
It decides when tokens are handed to their quantizer; it knows nothing of grids. A group is
quantized once, when all its tokens are there, and never again; nothing is padded. What is handed over
follows from the number of tokens alone, so how a sequence was cut into calls cannot matter.
Next file: `kernels/twin.py`.
"""

from dataclasses import replace

import torch
from torch import Tensor

from kvmini.attention import View
from kvmini.errors import KvminiError
from kvmini.growing import append, growable
from kvmini.kernels.source import Source
from kvmini.quantizers.base import Stored, check_tensor
from kvmini.side import Side

PREFILLS = ("exact", "streamed", "all")


class ExactStore:
    """The tokens of one side of one layer, all exact. `QuantizedStore` has the same face.

    Shapes:
        tokens `[B, Hkv, n, D]` in and out; their positions are 0 .. length - 1.
    """

    body: Stored | None = None  # what is held quantized: here, nothing

    def __init__(self):
        self.tokens: Tensor | None = None  # batch, heads and dtype come with the first tokens

    def append(self, x: Tensor) -> View:
        """Append tokens; all queries of the call see everything exactly."""
        self.tokens = growable(x.clone()) if self.tokens is None else append(self.tokens, x)
        return View(self.tokens)

    def read(self) -> Tensor:
        """The live tokens as a query sees them now."""
        return self.tokens

    def crop(self, n: int) -> None:
        """Keep the first n tokens; with none left, the store is as new."""
        self.tokens = growable(self.tokens[..., :n, :].clone()) if n else None

    def reorder(self, rows: Tensor) -> None:
        """Replace batch row i by row rows[i]."""
        self.tokens = growable(self.tokens[rows])

    def mark(self) -> Tensor | None:
        """What `rewind` needs to undo all appends made since: what is handed out never changes."""
        return self.tokens

    def rewind(self, mark: Tensor | None) -> None:
        """Be again as at `mark`."""
        self.tokens = mark

    @property
    def length(self) -> int:
        return 0 if self.tokens is None else self.tokens.shape[-2]

    @property
    def n_elements(self) -> int:
        """Elements of the live tokens."""
        return 0 if self.tokens is None else self.tokens.numel()

    @property
    def exact_tensors(self) -> list[Tensor]:
        """What is held exactly."""
        return [] if self.tokens is None else [self.tokens]


class QuantizedStore:
    """The tokens of one side of one layer: sinks | packed body | recent window.

    Shapes:
        tokens `[B, Hkv, n, D]` in and out; their positions are 0 .. length - 1.
    """

    def __init__(self, side: Side, layer: int, sinks: int, prefill: str):
        self.quantizer = side.quantizer_of(layer)
        self.flush, self.residual = side.flush_of(self.quantizer), side.residual_length
        self.sinks, self.prefill = sinks, prefill
        self.body: Stored | None = None  # batch, heads and dtype come with the first tokens
        self.sink = self.window = None
        self.dropped: list[range] = []  # slots of the body that `crop` cut out of a group

    def append(self, x: Tensor) -> View | Source:
        """Append exact tokens, hand over what leaves the window, and return what the call's queries see.

        One token, or prefill "exact": all queries see the store as it was, and the new tokens exactly; what they see
        is a `Source` then, which a kernel reads where it lies.
        "streamed": each query sees what it would see if tokens came one at a time.
        "all": everything dequantized but the sinks and a last part that fills no block. (For tables only: an
        early query sees a per_channel group whose scale later tokens have set.)
        """
        check_tensor(x)
        if self.body is None:
            self.sink = self.window = x[..., :0, :].detach().clone()
            self._keep(self.quantizer.quantize(self.window))
        first, end, least = self.length, self.sinks + self._n_live, self._least
        self._take_in(x)
        mode = "exact" if x.shape[-2] == 1 else self.prefill
        if mode == "all":
            self._hand_over()
            return View(self._read_all())
        before = self.source()
        self._hand_over()
        if mode == "exact":
            return before
        # `end`: where the body ended before this call. A query with `already` tokens before it sees as stored what
        # would have been handed over by then, a multiple of `flush`.
        already = first + torch.arange(x.shape[-2], device=x.device)
        more = (already - end - self.residual).clamp(min=0) // self.flush * self.flush
        return View(before.read(), self.read(), end + more.where(more >= least, 0))

    def read(self) -> Tensor:
        """The live tokens as a query sees them now: body dequantized, sinks and window exact."""
        return self.source().read()

    def source(self) -> Source:
        """The same where they lie. What it holds never changes, whatever is appended later."""
        return Source(self.quantizer, self.body, self.sink, self.window, self._live_slots() if self.dropped else None)

    def crop(self, n: int) -> None:
        """Keep the first n tokens. A group that n cuts stays whole, its dropped slots marked."""
        if n == 0:
            return self.rewind((None, None, None, []))
        n_body = max(0, n - self.sink.shape[-2])  # how many tokens may stay behind the sinks
        self.window = self.window[..., :max(0, n_body - self._n_live), :].clone()
        if n_body < self._n_live:
            slots = int(self._live_slots()[n_body - 1]) + 1 if n_body else 0
            blocks = -(-slots // self.quantizer.block)
            self._keep(self.quantizer.take(self.body, blocks=blocks))
            cut = range(slots, self.body.n_tokens)
            self.dropped = [*(older for older in self.dropped if older.stop <= slots), *([cut] if cut else [])]
        self.sink = self.sink[..., :n, :].clone()

    def reorder(self, rows: Tensor) -> None:
        """Replace batch row i by row rows[i], packed part and exact parts alike."""
        self.sink, self.window = self.sink[rows], self.window[rows]
        self._keep(self.quantizer.take(self.body, rows=rows))

    def mark(self) -> tuple:
        """What `rewind` needs to undo all appends made since: references, for nothing here is changed in place."""
        return self.sink, self.window, self.body, self.dropped

    def rewind(self, mark: tuple) -> None:
        """Be again as at `mark`."""
        self.sink, self.window, self.body, self.dropped = mark

    @property
    def length(self) -> int:
        return 0 if self.body is None else self.sink.shape[-2] + self._n_live + self.window.shape[-2]

    @property
    def n_elements(self) -> int:
        """Elements of the live tokens."""
        if self.body is None:
            return 0
        B, Hkv, _, D = self.sink.shape
        return B * Hkv * self.length * D

    @property
    def exact_tensors(self) -> list[Tensor]:
        """What is held exactly."""
        return [] if self.body is None else [self.sink, self.window]

    @property
    def _n_live(self) -> int:
        return 0 if self.body is None else self.body.n_tokens - sum(map(len, self.dropped))

    @property
    def _least(self) -> int:
        """Tokens that the next hand-over must have, at least."""
        return 0 if self.body is not None and self.body.n_tokens else self.quantizer.warm_up

    def _live_slots(self) -> Tensor:
        live = torch.ones(self.body.n_tokens, dtype=torch.bool, device=self.window.device)
        for slots in self.dropped:
            live[slots.start:slots.stop] = False
        return live.nonzero()[:, 0]

    def _keep(self, body: Stored) -> None:
        self.body = body
        for part in body.parts.values():
            growable(part)

    def _read_all(self) -> Tensor:
        """What "all" shows: the window quantized too, as far as it fills blocks."""
        n = self.window.shape[-2] // self.quantizer.block * self.quantizer.block
        both = self.quantizer.dequantize(self.quantizer.extend(self.body, self.window[..., :n, :]))
        older = both[..., self.body.n_tokens:, :]
        return torch.cat([replace(self.source(), window=older).read(), self.window[..., n:, :]], dim=-2)

    def _take_in(self, x: Tensor) -> None:
        room = self.sinks - self.sink.shape[-2]
        if room:
            self.sink = torch.cat([self.sink, x[..., :room, :]], dim=-2)
        self.window = torch.cat([self.window, x[..., room:, :]], dim=-2)

    def _hand_over(self) -> None:
        n = max(0, self.window.shape[-2] - self.residual) // self.flush * self.flush
        if n and n >= self._least:
            self._keep(self.quantizer.extend(self.body, self.window[..., :n, :]))
            self.window = self.window[..., n:, :].clone()


def check_fits(store: ExactStore | QuantizedStore, x: Tensor) -> None:
    """Raise KvminiError unless x `[B, Hkv, S, D]` can follow what the store holds."""
    for old in store.exact_tensors:
        if (old.shape[:2], old.shape[3], old.dtype) != (x.shape[:2], x.shape[3], x.dtype):
            B, Hkv, _, D = old.shape
            raise KvminiError(f"the cache holds {old.dtype} [{B}, {Hkv}, T, {D}] and cannot take "
                              f"{x.dtype} {list(x.shape)}")
