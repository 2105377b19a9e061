"""Dense and sparse: a few outliers are kept as float16 numbers with their places, so that the grid need not reach them.

What is stored per token: how many outliers it has, and for each its channel (over all heads) and its value. All
of it is counted. Which numbers are outliers is told by thresholds from calibration text (`StaticOutliers`, for
keys) or by the token itself (`TopOutliers`, for values). Any grid can be inside. Next file: `quantizers/normalized.py`.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvmini.errors import KvminiError
from kvmini.growing import append
from kvmini.quantizers.base import Stored, check_tensor
from kvmini.quantizers.transformed import INSIDE, WrappedQuantizer, merge, unmerge, wide, wide_dtype

SPARSE = ("values", "channels", "counts")
SHARE = 0.01  # of all numbers, half of them on either end


@dataclass(frozen=True, eq=False)
class SparseQuantizer(WrappedQuantizer):
    """The grid `inner` for what `within` leaves, and every number that it changes beside it.

    Shapes:
        x `[..., Hkv, T, D]`; beside the inner parts: values float16 and channels uint8 (int16 past 255 channels)
        `[N, 1]`, batch row by batch row and token by token; counts `[..., 1, T, 1]`, of the channels' type.
    Raises:
        KvminiError for an outlier past the largest float16 number.
    Source:
        KVQuant (arXiv 2401.18079), section 3.4: there the outliers leave 0 behind in the dense part, or the median;
        here the end of the range. They are read from the sparse part either way.
    """

    does_not_promise: ClassVar[dict[str, str]] = {
        **INSIDE, **dict.fromkeys(("L03", "L04", "L06", "L09", "L11"), "the grid is laid on what outliers leave"),
        "L05": "an outlier is exact, its neighbours are not", "L08": "outliers are those of a token",
        **dict.fromkeys(("L07", "L19"), "the heads of one token share their outliers"),
        "L27": "outliers and their places are counted, too"}

    @abstractmethod
    def within(self, x: Tensor) -> Tensor:
        """x with its outliers moved into the range of the others."""

    def quantize(self, x: Tensor) -> Stored:
        check_tensor(x)
        x = x.detach()
        dense = self.within(x)
        channels, outlier = merge(x), merge(dense != x)
        kind = torch.uint8 if channels.shape[-1] <= 255 else torch.int16
        counts = outlier.sum(-1)[..., None].to(kind)
        values = channels[outlier][:, None]
        if values.numel() and values.abs().max() > 65504:
            raise KvminiError(f"an outlier of {values.abs().max().item():.6g} does not fit float16 (largest 65504)")
        places = outlier.nonzero()[:, -1:].to(kind)
        stored = self.inner.quantize(dense)
        return replace(stored, parts=stored.parts | {"values": values.half(), "channels": places,
                                                     "counts": counts[..., None, :, :] if x.ndim > 2 else counts})

    def dequantize(self, stored: Stored) -> Tensor:
        x = self.inner.dequantize(stored)
        channels = merge(x).contiguous()
        values, places, counts = (stored.parts[name] for name in SPARSE)
        token = torch.arange(counts.numel(), device=x.device).repeat_interleave(counts.flatten().long())
        at = token * channels.shape[-1] + places[:, 0].long()
        channels.view(-1)[at] = values[:, 0].to(x.dtype)
        return unmerge(channels, x.shape)

    def extend(self, body: Stored, x: Tensor) -> Stored:
        return self.cat(body, self.quantize(x))

    def cat(self, a: Stored, b: Stored) -> Stored:
        both = [[*pair] for pair in zip(self._by_row(a), self._by_row(b), strict=True)]
        dense = self.inner.cat(self._dense(a), self._dense(b))
        counts = append(a.parts["counts"], b.parts["counts"])
        return self._join(dense, [part for pair in both for part in pair], counts)

    def take(self, stored: Stored, rows: Tensor | None = None, blocks: int | None = None) -> Stored:
        pieces, counts = self._by_row(stored), stored.parts["counts"]
        dense = self.inner.take(self._dense(stored), rows, blocks)
        if rows is not None:
            counts, pieces = counts[rows], [pieces[row] for row in rows.tolist()]
        if blocks is not None:
            counts = counts[..., :dense.n_tokens, :].clone()
            kept = self._per_row(counts)
            pieces = [(values[:n], channels[:n]) for (values, channels), n in zip(pieces, kept, strict=True)]
        return self._join(dense, pieces, counts)

    @staticmethod
    def _dense(stored: Stored) -> Stored:
        return replace(stored, parts={name: part for name, part in stored.parts.items() if name not in SPARSE})

    @staticmethod
    def _per_row(counts: Tensor) -> list[int]:
        return counts.long().sum((-3, -2, -1)).flatten().tolist() if counts.ndim > 3 else [int(counts.long().sum())]

    def _by_row(self, stored: Stored) -> list[tuple[Tensor, Tensor]]:
        """Each batch row's values and channels."""
        values, channels, counts = (stored.parts[name] for name in SPARSE)
        n = self._per_row(counts)
        return list(zip(values.split(n), channels.split(n), strict=True))

    @staticmethod
    def _join(dense: Stored, pieces: list[tuple[Tensor, Tensor]], counts: Tensor) -> Stored:
        values, channels = (torch.cat(part) for part in zip(*pieces, strict=True))
        return replace(dense, parts=dense.parts | {"values": values, "channels": channels, "counts": counts})


@dataclass(frozen=True, eq=False)
class StaticOutliers(SparseQuantizer):
    """What lies strictly outside of `low` .. `high`, thresholds from calibration text.

    Example:
        >>> from kvmini import UniformQuantizer
        >>> q = StaticOutliers(UniformQuantizer(2, "per_token", 4), torch.tensor(0.0), torch.tensor(3.0))
        >>> q.dequantize(q.quantize(torch.tensor([[0.0, 1.0, 3.0, 100.0]]))).tolist()
        [[0.0, 1.0, 3.0, 100.0]]
    """

    low: Tensor
    high: Tensor

    def within(self, x: Tensor) -> Tensor:
        low, high = (t.to(wide_dtype(x.dtype)) for t in (self.low, self.high))
        clipped = wide(x).clamp(low, high)
        return torch.where(clipped == wide(x), x, clipped.to(x.dtype))


@dataclass(frozen=True, eq=False)
class TopOutliers(SparseQuantizer):
    """The k largest and the k smallest of each token over all heads, k = share/2 of its channels, at least 1.

    A number that is equal to one of the others needs no place of its own, so a token can have fewer.

    Example:
        >>> from kvmini import UniformQuantizer
        >>> q = TopOutliers(UniformQuantizer(1, "per_token", 4), share=0.01)
        >>> q.dequantize(q.quantize(torch.tensor([[0.0, 1.0, -9.0, 100.0]]))).tolist()
        [[0.0, 1.0, -9.0, 100.0]]
    """

    share: float = SHARE

    def within(self, x: Tensor) -> Tensor:
        channels = merge(x)
        k = max(1, round(self.share / 2 * channels.shape[-1]))
        if 2 * k >= channels.shape[-1]:
            raise KvminiError(f"{2 * k} outliers of a token of {channels.shape[-1]} channels leave nothing to quantize")
        by_size = channels.sort(-1).values
        return unmerge(channels.clamp(by_size[..., k:k + 1], by_size[..., -k - 1:channels.shape[-1] - k]), x.shape)


def thresholds(x: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Two-sided per channel: `[Hkv, T, D]` -> low and high `[Hkv, 1, D]`, with share/2 of the tokens beyond each."""
    low, high = torch.quantile(x.double(), torch.tensor([share / 2, 1 - share / 2], dtype=torch.float64), dim=-2,
                               keepdim=True).float()
    return low, high
