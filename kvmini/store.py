"""The life of a token on one side (keys or values) of one layer: sink or window, then packed body.

    | sinks, exact | packed body: codes, scales, minimums | recent window, exact |
                                                          ^ handed(n)

A side has a store in every layer: `ExactStore` keeps everything, `QuantizedStore` is the picture above.
It decides when tokens are handed to their quantizer; it knows nothing of grids. A group is
quantized once, when all its tokens are there, and never again; nothing is padded. What is handed over
follows from the number of tokens alone, so how a sequence was cut into calls cannot matter. Next file: `cache.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmini.attention import View
from kvmini.errors import KvminiError, count_of
from kvmini.quantizers.base import Quantizer, Stored, check_tensor

PREFILLS = ("exact", "streamed", "all")


@dataclass(frozen=True)
class Side:
    """How keys, or values, are kept: the quantizer, and when it is called.

    `residual_length` (R) recent tokens stay exact; what is older is handed over `flush_length` (F) tokens
    at a time, by default one block of the quantizer (1 token per_token, G tokens per_channel). So a
    per_token side keeps R recent tokens, a per_channel side R .. R + G - 1.
    A callable `quantizer` is given the layer's index and returns that layer's quantizer.

    Raises:
        KvminiError if R or F is not a whole number, F is no multiple of the block, or the quantizer has no block.
    Example:
        >>> from kvmini import Side, UniformQuantizer
        >>> side = Side(UniformQuantizer(2, "per_channel", 32), residual_length=128)
        >>> side.flush_of(side.quantizer_of(layer=0))
        32
    """

    quantizer: Quantizer | Callable[[int], Quantizer]
    residual_length: int = 0
    flush_length: int | None = None

    def __post_init__(self):
        count_of(self.residual_length, "residual_length", lowest=0)
        if self.flush_length is not None:
            count_of(self.flush_length, "flush_length")
        if isinstance(self.quantizer, Quantizer) or not callable(self.quantizer):
            self.flush_of(self.quantizer_of(0))

    def quantizer_of(self, layer: int) -> Quantizer:
        by_layer = callable(self.quantizer) and not isinstance(self.quantizer, Quantizer)
        quantizer = self.quantizer(layer) if by_layer else self.quantizer
        if not isinstance(quantizer, Quantizer):
            raise KvminiError(f"a side needs a kvmini Quantizer (subclass it), not {type(quantizer).__name__}")
        return quantizer

    def flush_of(self, quantizer: Quantizer) -> int:
        block = quantizer.block
        if block is None:
            raise KvminiError("a cache cannot use a quantizer with block None (per_tensor): its scale would depend on "
                              "how the sequence was cut into calls; use per_token or per_channel")
        flush = self.flush_length or block
        if flush % block:
            raise KvminiError(f"flush_length {flush} is not a multiple of the quantizer's block of {block} tokens")
        return flush


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
        self.tokens = x.clone() if self.tokens is None else torch.cat([self.tokens, x], dim=-2)
        return View(self.tokens)

    def read(self) -> Tensor:
        """The live tokens as a query sees them now."""
        return self.tokens

    def crop(self, n: int) -> None:
        """Keep the first n tokens; with none left, the store is as new."""
        self.tokens = self.tokens[..., :n, :].clone() if n else None

    def reorder(self, rows: Tensor) -> None:
        """Replace batch row i by row rows[i]."""
        self.tokens = self.tokens[rows]

    def mark(self) -> int:
        """What `rewind` needs to undo all appends made since."""
        return self.length

    def rewind(self, mark: int) -> None:
        """Be again as at `mark`."""
        if self.length > mark:
            self.crop(mark)

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

    def append(self, x: Tensor) -> View:
        """Append exact tokens, hand over what leaves the window, and return what the call's queries see.

        One token, or prefill "exact": all queries see the store as it was, and the new tokens exactly.
        "streamed": each query sees what it would see if tokens came one at a time.
        "all": everything dequantized but the sinks and a last part that fills no block. (For tables only: an
        early query sees a per_channel group whose scale later tokens have set.)
        """
        check_tensor(x)
        if self.body is None:
            self.sink = self.window = x[..., :0, :].detach().clone()
            self.body = self.quantizer.quantize(self.window)
        first, end, least = self.length, self.sinks + self._n_live, self._least
        self._take_in(x)
        mode = "exact" if x.shape[-2] == 1 else self.prefill
        if mode == "all":
            self._hand_over()
            return View(self._read_all())
        before = self.read()
        self._hand_over()
        if mode == "exact":
            return View(before)
        # `end`: where the body ended before this call. A query with `already` tokens before it sees as stored what
        # would have been handed over by then, a multiple of `flush`.
        already = first + torch.arange(x.shape[-2], device=x.device)
        more = (already - end - self.residual).clamp(min=0) // self.flush * self.flush
        return View(before, self.read(), end + more.where(more >= least, 0))

    def read(self) -> Tensor:
        """The live tokens as a query sees them now: body dequantized, sinks and window exact."""
        return torch.cat([self.sink, self._read_body(), self.window], dim=-2)

    def crop(self, n: int) -> None:
        """Keep the first n tokens. A group that n cuts stays whole, its dropped slots marked."""
        if n == 0:
            return self.rewind((None, None, None, []))
        n_body = max(0, n - self.sink.shape[-2])  # how many tokens may stay behind the sinks
        self.window = self.window[..., :max(0, n_body - self._n_live), :].clone()
        if n_body < self._n_live:
            slots = int(self._live_slots()[n_body - 1]) + 1 if n_body else 0
            blocks = -(-slots // self.quantizer.block)
            self.body = self.quantizer.take(self.body, blocks=blocks)
            cut = range(slots, self.body.n_tokens)
            self.dropped = [*(older for older in self.dropped if older.stop <= slots), *([cut] if cut else [])]
        self.sink = self.sink[..., :n, :].clone()

    def reorder(self, rows: Tensor) -> None:
        """Replace batch row i by row rows[i], packed part and exact parts alike."""
        self.sink, self.window = self.sink[rows], self.window[rows]
        self.body = self.quantizer.take(self.body, rows=rows)

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

    def _read_body(self) -> Tensor:
        x = self.quantizer.dequantize(self.body)
        return x[..., self._live_slots(), :] if self.dropped else x

    def _read_all(self) -> Tensor:
        """What "all" shows: the window quantized too, as far as it fills blocks."""
        n = self.window.shape[-2] // self.quantizer.block * self.quantizer.block
        older = self.quantizer.dequantize(self.quantizer.extend(self.body, self.window[..., :n, :]))
        older = older[..., self.body.n_tokens:, :]
        return torch.cat([self.sink, self._read_body(), older, self.window[..., n:, :]], dim=-2)

    def _take_in(self, x: Tensor) -> None:
        room = self.sinks - self.sink.shape[-2]
        if room:
            self.sink = torch.cat([self.sink, x[..., :room, :]], dim=-2)
        self.window = torch.cat([self.window, x[..., room:, :]], dim=-2)

    def _hand_over(self) -> None:
        n = max(0, self.window.shape[-2] - self.residual) // self.flush * self.flush
        if n and n >= self._least:
            self.body = self.quantizer.extend(self.body, self.window[..., :n, :])
            self.window = self.window[..., n:, :].clone()
