"""What a kernel reads: keys or values where they lie, and which kernels can read them.

    | sink, exact | packed body: codes, scales, minimums | window, exact |

The plain way is `read`: dequantize the body, put the three together, attend. A kernel attends without making that
tensor. The kernel to read first is `kernels/twin.py`. Next file: `store.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from kvmini.attention import View
from kvmini.packing import word
from kvmini.quantizers.base import Quantizer, Stored
from kvmini.rope import Rope


@dataclass(frozen=True, eq=False)
class Source:
    """Keys or values of one layer as they lie in a cache, tokens 0 .. length - 1.

    Shapes:
        sink, window `[B, Hkv, n, D]`, exact; body: what `quantizer` stored between them; live: those of its slots that
        hold a token, where not all do. rope: keys that were stored before it, the exact ones too.
    """

    quantizer: Quantizer
    body: Stored
    sink: Tensor
    window: Tensor
    live: Tensor | None = None
    rope: Rope | None = None

    @property
    def length(self) -> int:
        n_body = self.body.n_tokens if self.live is None else len(self.live)
        return self.sink.shape[-2] + n_body + self.window.shape[-2]

    @property
    def parts(self) -> tuple[int, int, int]:
        """How many tokens are in the sink, the body and the window."""
        return self.sink.shape[-2], self.length - self.sink.shape[-2] - self.window.shape[-2], self.window.shape[-2]

    # What a `View` has, for whoever attends the plain way: all queries see the same tokens.

    stored: ClassVar[None] = None
    boundary: ClassVar[None] = None

    @cached_property
    def tokens(self) -> Tensor:
        return self.read()

    def map(self, f: Callable[[Tensor], Tensor]) -> View:
        return View(self.tokens).map(f)

    def rows(self, start: int, stop: int, n_tokens: int) -> View:
        return View(self.tokens).rows(start, stop, n_tokens)

    def read(self) -> Tensor:
        """All tokens `[B, Hkv, length, D]`, dequantized, keys rotated."""
        body = self.quantizer.dequantize(self.body)
        x = torch.cat([self.sink, body if self.live is None else body[..., self.live, :], self.window], dim=-2)
        return x if self.rope is None else self.rope.apply(x, range(self.length))

    @cached_property
    def grid(self) -> "Grid | None":
        """The body as a kernel knows it; None where it is anything but codes, scales and minimums."""
        affine = None if self.live is not None else self.quantizer.affine(self.body)
        return None if affine is None else Grid(*affine, self.body.n_bits, self.body.shape[-1])


Seen = View | Source  # keys or values as the queries of a call see them


@dataclass(frozen=True, eq=False)
class Grid:
    """x = code * scale + minimum in groups, which are runs of channels (per_token) or of tokens (per_channel).

    Shapes:
        packed uint8 `[B, Hkv, T, bytes]`; scale and minimum `[B, Hkv, T, D/G]` or `[B, Hkv, T/G, D]`
    """

    packed: Tensor
    scale: Tensor
    minimum: Tensor
    n_bits: int
    D: int

    @property
    def per_token(self) -> bool:
        return self.scale.shape[-2] == self.packed.shape[-2]

    @property
    def group_size(self) -> int:
        T, (rows, columns) = self.packed.shape[-2], self.scale.shape[-2:]
        return self.D // columns if self.per_token else T // rows

    @property
    def whole_words(self) -> bool:
        """Whether no word of codes lies across two groups."""
        empty = not self.packed.shape[-2]
        return empty or not self.per_token or self.group_size % word(self.n_bits)[0] == 0
