"""RotateKV: spread outlier channels by a rotation, sort the rotated channels, clip, and group within a token.

    rotate     normalised Walsh-Hadamard transform of each head, or of some heads together; its own inverse
    reorder    all heads' channels sorted by their mean on calibration text, so that a group's range is tight
    clip       the grid covers only part of its group's range

Each is a wrapper around a grid, so each can be had without the others: a Hadamard transform alone is one
rotation shared by all heads, the calibrated order is what adapts it to each. The released code sorts after it
rotates, as here; the paper's abstract can be read as sorting first (`ReorderedQuantizer(HadamardQuantizer(grid))`
with the order of unrotated channels). Keys must be stored before RoPE, for the order and several heads together do
not commute with it. Next file: `quantizers/nonuniform.py`.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvmini import axes
from kvmini.errors import KvminiError, count_of
from kvmini.quantizers.base import Stored
from kvmini.quantizers.transformed import INSIDE, TransformedQuantizer, merge, unmerge
from kvmini.quantizers.uniform import UniformQuantizer

MIXES = "one element moves all that it is mixed with"


def fwht(x: Tensor) -> Tensor:
    """Normalised fast Walsh-Hadamard transform of the last dimension: n log2 n additions, its own inverse.

    Raises:
        KvminiError unless the dimension is a power of two.
    Example:
        >>> fwht(torch.tensor([8.0, 0.0, 0.0, 0.0])).tolist()      # an outlier, spread evenly
        [4.0, 4.0, 4.0, 4.0]
    """
    n = x.shape[-1]
    if n < 1 or n & (n - 1):
        raise KvminiError(f"a Hadamard transform takes a power of two of channels, not {n}")
    for half in (2**i for i in range(n.bit_length() - 1)):
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack([a + b, a - b], dim=-2).flatten(-3)
    return x / n**0.5


@dataclass(frozen=True)
class HadamardQuantizer(TransformedQuantizer):
    """Each head of a token (or `heads` neighbouring ones together) is rotated before the inner grid.

    Values need no undoing before they are averaged, and post-RoPE keys none before a rotated query reads them:
    `map_output` and `map_query` say so, for heads rotated one by one.

    Math:
        x H, H the symmetric Hadamard matrix / sqrt(n), n = heads * D; H H = 1.
    Raises:
        KvminiError unless heads * D is a power of two and `heads` divides Hkv.
    Source:
        RotateKV (arXiv 2501.16383); QuaRot for values.
    Example:
        >>> x = torch.zeros(1, 1, 1, 8)
        >>> x[..., 3] = 8.0
        >>> q = HadamardQuantizer(UniformQuantizer(1, "per_token", 8))
        >>> bool((q.dequantize(q.quantize(x)) - x).abs().max() < 0.01)    # one bit is enough: +-2.83
        True
    """

    does_not_promise: ClassVar[dict[str, str]] = {
        **INSIDE, "L02": "small numbers drown in large ones that they are mixed with",
        "L03": "the half step holds for the rotated numbers; rotated back, their errors add up",
        "L04": "a constant group is no constant once rotated",
        "L05": MIXES, "L06": "rotating forth and back rounds", "L07": MIXES + ", groups of one token included",
        "L08": MIXES, "L09": "a shift is no shift once rotated", "L11": "nested grids are those of the rotated numbers",
        "L19": "channels that are mixed cannot be permuted"}

    heads: int = 1

    def __post_init__(self):
        count_of(self.heads, "heads")

    def forward(self, x: Tensor) -> Tensor:
        if self.heads == 1:
            return fwht(x)
        if x.ndim < 3 or x.shape[-3] % self.heads:
            raise KvminiError(f"{x.shape[-3] if x.ndim > 2 else 1} heads cannot be rotated {self.heads} at a time")
        groups = x.unflatten(-3, (-1, self.heads))  # [..., Hkv / heads, heads, T, D]
        return unmerge(fwht(merge(groups)), groups.shape).flatten(-4, -3)

    backward = forward

    def map_query(self, q: Tensor, stored: Stored) -> Tensor:
        return self._alone(q)

    def map_output(self, out: Tensor, stored: Stored) -> Tensor:
        return self._alone(out)

    def _alone(self, x: Tensor) -> Tensor:
        if self.heads > 1:
            raise KvminiError(f"{self.heads} heads rotated together can only be read through dequantize")
        return fwht(x)


@dataclass(frozen=True, eq=False)
class ReorderedQuantizer(TransformedQuantizer):
    """All channels of a token, its heads beside each other, in another order: `order` int64 `[Hkv * D]`.

    The sorted channels are cut into Hkv runs of D again, so a grid's groups are runs of the sorted channels.

    Example:
        >>> order = channel_order(torch.tensor([[[0.0, 9.0, 1.0, 8.0]]]))
        >>> order.tolist(), ReorderedQuantizer(None, order).forward(torch.tensor([[[0.0, 9.0, 1.0, 8.0]]])).tolist()
        ([0, 2, 3, 1], [[[0.0, 1.0, 8.0, 9.0]]])
    """

    does_not_promise: ClassVar[dict[str, str]] = INSIDE | dict.fromkeys(
        ("L03", "L04", "L05", "L06", "L07", "L08", "L11", "L19"), "a group's channels stand apart, in several heads")

    order: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return unmerge(self._channels(x)[..., self.order], x.shape)

    def backward(self, x: Tensor) -> Tensor:
        return unmerge(self._channels(x)[..., self.order.argsort()], x.shape)

    def _channels(self, x: Tensor) -> Tensor:
        channels = merge(x)
        if channels.shape[-1] != len(self.order):
            raise KvminiError(f"an order of {len(self.order)} channels does not fit {channels.shape[-1]} of them")
        return channels


def channel_order(x: Tensor) -> Tensor:
    """Channels by their mean over tokens, signed, ascending: `[..., Hkv, T, D]` -> int64 `[Hkv * D]`."""
    channels = merge(x)
    return channels.double().flatten(0, -2).mean(0).argsort(stable=True)


@dataclass(frozen=True)
class ClippedQuantizer(TransformedQuantizer):
    """Each group of a uniform grid is clipped to `ratio` of its range before that grid is laid.

    The range shrinks about its middle. The released code multiplies minimum and maximum themselves by the ratio,
    which for a group of one sign (all of them may be, once channels are sorted by their mean) cuts off the wrong
    end: 10 .. 11 becomes 8 .. 8.8.

    Raises:
        KvminiError for an inner quantizer without groups.
    Example:
        >>> x = torch.tensor([[0.0, 3.0, 4.0, 10.0]])
        >>> ClippedQuantizer(UniformQuantizer(2, "per_token", 4), ratio=0.8).forward(x).tolist()
        [[1.0, 3.0, 4.0, 9.0]]
    """

    does_not_promise: ClassVar[dict[str, str]] = {
        **INSIDE, "L03": "what is clipped is off by more than half a step", "L06": "clips again what was clipped",
        "L09": "where the range is cut is rounded",
        "L11": "a finer grid comes nearer to the cut end, not to what was cut"}

    inner: UniformQuantizer
    ratio: float = 0.8

    def __post_init__(self):
        if not hasattr(self.inner, "group_size"):
            raise KvminiError(f"clipping goes around a grid with groups, not around {type(self.inner).__name__}")

    def forward(self, x: Tensor) -> Tensor:
        groups = axes.split(x, self.inner.axis, self.inner.group_size)
        if not groups.numel():
            return x
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        cut = (high - low) * ((1 - self.ratio) / 2)
        return axes.join(groups.clamp(low + cut, high - cut), self.inner.axis, x.shape)

    def backward(self, x: Tensor) -> Tensor:
        return x
