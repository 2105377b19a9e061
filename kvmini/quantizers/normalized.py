"""InnerQ: divide keys by a factor per channel, so that groups may run along channels, where scores are summed.

Keys then want groups within a token and values groups along tokens: the reverse of KIVI, and what a kernel likes,
for a scale is shared along the dot product that it enters. The factor n_c = sqrt(max_t |k_tc|) splits an outlier
between key and query, who is multiplied by it (`map_query`); it is measured on the first 128 tokens handed over and
then frozen (`NormalizedQuantizer`), or comes from calibration text (`ScaledQuantizer`; or `calibration.folded`,
into the weights). Values may use the hybrid grid.

Not taken over from the released code: its windows, which its own drain empties (here hand-over keeps them whole).
Next file: `quantizers/hybrid.py`.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvmini.errors import KvminiError
from kvmini.quantizers.base import Stored, check_tensor
from kvmini.quantizers.transformed import INSIDE, TransformedQuantizer, WrappedQuantizer

MEASURED = 128  # tokens that the factors are taken from
PER_CHANNEL = "each channel has its own factor"


def channel_factors(x: Tensor) -> Tensor:
    """sqrt(max_t |x|) of each channel, 1 where that is 0: `[..., T, D]` -> `[..., 1, D]`; of no tokens, none.

    Source:
        InnerQ (arXiv 2602.23200), its released code.
    Example:
        >>> channel_factors(torch.tensor([[1.0, -9.0, 0.0], [-4.0, 0.0, 0.0]])).tolist()
        [[2.0, 3.0, 1.0]]
    """
    if not x.shape[-2]:
        return x
    factors = x.abs().amax(-2, keepdim=True).sqrt()
    return torch.where(factors > 0, factors, 1)


@dataclass(frozen=True, eq=False)
class ScaledQuantizer(TransformedQuantizer):
    """The inner grid on x / factor, with factors known beforehand, `[Hkv, 1, D]`; constants, as weights are.

    Example:
        >>> from kvmini import UniformQuantizer
        >>> q = ScaledQuantizer(UniformQuantizer(2, "per_token", 2), torch.tensor([1.0, 100.0]))
        >>> q.dequantize(q.quantize(torch.tensor([[3.0, 200.0]]))).round().tolist()
        [[3.0, 200.0]]
    """

    does_not_promise: ClassVar[dict[str, str]] = dict.fromkeys(
        ("L03", "L04", "L05", "L06", "L08", "L09", "L11", "L19"), PER_CHANNEL) | INSIDE

    factor: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return x / self.factor.to(x.dtype)

    def backward(self, x: Tensor) -> Tensor:
        return x * self.factor.to(x.dtype)

    def map_query(self, q: Tensor, stored: Stored) -> Tensor:
        """Scores of this query with keys read without their factors are those of q with the keys."""
        factor = self.factor.to(q.dtype)
        return q * (factor.repeat_interleave(q.shape[-3] // factor.shape[-3], dim=-3) if factor.ndim > 2 else factor)


@dataclass(frozen=True)
class NormalizedQuantizer(WrappedQuantizer):
    """The inner grid on x / factor, the factors measured on a sequence's own first 128 tokens handed over.

    A cache waits until there are that many. The factors are stored with the sequence (float16, counted), follow its
    batch row, and are forgotten when `crop` leaves nothing stored.

    Shapes:
        x `[..., T, D]`; beside the inner parts: factor `[..., 1, D]`
    Raises:
        KvminiError where two pieces with different factors are joined.
    Example:
        >>> from kvmini import UniformQuantizer
        >>> q = NormalizedQuantizer(UniformQuantizer(2, "per_token", 2))
        >>> stored = q.quantize(torch.tensor([[4.0, 0.0], [0.0, 16.0]]))
        >>> stored.parts["factor"].tolist(), q.extend(stored, torch.tensor([[0.0, 64.0]])).n_tokens
        ([[2.0, 4.0]], 3)
    """

    warm_up: ClassVar[int] = MEASURED
    does_not_promise: ClassVar[dict[str, str]] = {
        **ScaledQuantizer.does_not_promise, "L07": "the first tokens set the factors of all",
        "L20": "the first tokens set the factors of all", "L14": "joined pieces have their factors once",
        "L27": "the factors are counted, too"}

    def quantize(self, x: Tensor) -> Stored:
        check_tensor(x)
        factor = channel_factors(x[..., :MEASURED, :].detach().double())
        if x.numel() and factor.max() > 65504:
            raise KvminiError(f"a factor of {factor.max().item():.6g} does not fit float16 (largest 65504)")
        return self._with(factor.half().clamp(min=torch.finfo(torch.float16).tiny), x)

    def extend(self, body: Stored, x: Tensor) -> Stored:
        if not body.n_tokens:
            return self.quantize(x)
        return self.cat(body, self._with(body.parts["factor"], x))

    def dequantize(self, stored: Stored) -> Tensor:
        return self._scaled(stored.parts["factor"]).dequantize(stored)

    def cat(self, a: Stored, b: Stored) -> Stored:
        if not (a.n_tokens and b.n_tokens):
            return a if a.n_tokens else b
        factor = a.parts["factor"]
        if not torch.equal(factor, b.parts["factor"]):
            raise KvminiError("two pieces with different factors cannot be joined: hand tokens over with extend")
        return self._put_back(self.inner.cat(*map(self._inside, (a, b))), factor)

    def take(self, stored: Stored, rows: Tensor | None = None, blocks: int | None = None) -> Stored:
        factor = stored.parts["factor"] if rows is None else stored.parts["factor"][rows]
        inside = self.inner.take(self._inside(stored), rows, blocks)
        return self._put_back(inside, factor if inside.n_tokens else factor[..., :0, :].clone())

    def map_query(self, q: Tensor, stored: Stored) -> Tensor:
        return self._scaled(stored.parts["factor"]).map_query(q, stored)

    def _scaled(self, factor: Tensor) -> ScaledQuantizer:
        return ScaledQuantizer(self.inner, factor)

    def _with(self, factor: Tensor, x: Tensor) -> Stored:
        return self._put_back(self._scaled(factor).quantize(x), factor)

    @staticmethod
    def _inside(stored: Stored) -> Stored:
        return replace(stored, parts={name: part for name, part in stored.parts.items() if name != "factor"})

    @staticmethod
    def _put_back(stored: Stored, factor: Tensor) -> Stored:
        return replace(stored, parts={**stored.parts, "factor": factor})
