"""KVQuant: levels where the numbers are, instead of an even grid.

A `Codebook` is 2^b levels in [-1, 1], fitted by weighted k-means. Keys are put into that range by what each
channel did on calibration text (`StaticQuantizer`), so nothing needs to be stored beside the codes and no token
waits for others; values by the range of their own token over all heads (`TokenwiseQuantizer`). With even levels
the static quantizer is also "per tensor" and "per channel" as papers on static quantization mean them.

Outliers kept apart are `quantizers/sparse.py`, the next file.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvmini.errors import KvminiError, count_of
from kvmini.packing import pack
from kvmini.quantizers.base import Quantizer, Stored, check_tensor
from kvmini.quantizers.transformed import narrow, wide, wide_dtype
from kvmini.rounding import round_down, round_up

BINS = 4096  # of the histogram that k-means sees: a bin is 1/2048 wide
UNEVEN = "levels are where the numbers are, so some steps are wide"


@dataclass(frozen=True, eq=False)
class Codebook:
    """What is rounded to (`levels`, ascending) and what a code then means (`values`; by default the same).

    Shapes:
        both `[2^n_bits]`, in [-1, 1] or near it
    Example:
        >>> book = Codebook(torch.tensor([-1.0, 0.0, 0.25, 1.0]))
        >>> book.n_bits, book.encode(torch.tensor([-0.8, 0.1, 0.2, 9.0])).tolist()
        (2, [0, 1, 2, 3])
    """

    levels: Tensor
    values: Tensor | None = None

    @property
    def n_bits(self) -> int:
        return (len(self.levels) - 1).bit_length()

    def encode(self, u: Tensor) -> Tensor:
        """The nearest level's index, uint8; half way between two, the lower one."""
        levels = self.levels.to(u)
        return torch.bucketize(u.contiguous(), (levels[1:] + levels[:-1]) / 2).to(torch.uint8)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return (self.levels if self.values is None else self.values).to(dtype)[codes.long()]

    def normalized(self, u: Tensor) -> "Codebook":
        """Q-Norm, for 2 bits: values that give `u` its own mean and deviation back, which rounding changes.

        Math:
            value = level * s1/s2 + m1 - m2 * s1/s2; m1, s1 of u, m2, s2 of u rounded.
        """
        u = u.double().flatten()
        rounded = self.decode(self.encode(u), torch.float64)
        ratio = u.std() / rounded.std()
        return Codebook(self.levels, (self.levels.double() * ratio + u.mean() - rounded.mean() * ratio).float())


def even_levels(n_bits: int) -> Codebook:
    """The uniform grid as a codebook.

    Example:
        >>> even_levels(1).levels.tolist()
        [-1.0, 1.0]
    """
    return Codebook(torch.linspace(-1, 1, 2**count_of(n_bits, "n_bits", highest=8)))


def fitted_levels(u: Tensor, n_bits: int, weights: Tensor | None = None) -> Codebook:
    """Weighted k-means of numbers in [-1, 1]; weights say how much an error of each is minded.

    KVQuant weighs by the squared gradient of the loss times the squared scale that normalised the number (its
    released code leaves the scale out). k-means sees a histogram of 4,096 bins, each at the mean of what is in it.

    Shapes:
        u of any shape, weights alike -> a codebook of 2^n_bits levels
    Source:
        KVQuant (arXiv 2401.18079), section 3.3; scikit-learn's KMeans with its settings there.
    """
    from sklearn.cluster import KMeans  # here, for whoever needs no k-means need not wait for it

    u = u.detach().double().flatten().clamp(-1, 1)
    weights = torch.ones_like(u) if weights is None else weights.detach().double().flatten()
    bins = ((u + 1) / 2 * BINS).long().clamp(max=BINS - 1)
    mass = torch.zeros(BINS, dtype=torch.float64).index_add(0, bins, weights)
    centre = torch.zeros(BINS, dtype=torch.float64).index_add(0, bins, weights * u) / mass
    full = mass > 0
    n_levels = 2**count_of(n_bits, "n_bits", highest=8)
    if full.sum() < n_levels:
        raise KvminiError(f"{n_levels} levels cannot be fitted to {int(full.sum())} different numbers")
    means = KMeans(n_levels, n_init="auto", max_iter=50, random_state=0)
    means.fit(centre[full, None].numpy(), sample_weight=(mass[full] / mass.mean()).numpy())
    return Codebook(torch.tensor(means.cluster_centers_[:, 0]).sort().values.float())


@dataclass(frozen=True, eq=False)
class StaticQuantizer(Quantizer):
    """Ranges known beforehand; numbers outside come back as the range's end.

    `low` and `high` are constants of a model as its weights are: they are not in what is stored, and not counted.

    Shapes:
        low, high: what broadcasts to `[Hkv, T, D]`: `[Hkv, 1, D]` per channel, `[1, 1, 1]` per tensor
    Math:
        middle m = (high + low)/2, half h = (high - low)/2; code = nearest level to (x - m)/h; x_hat = value * h + m
    Example:
        >>> q = StaticQuantizer(even_levels(2), torch.tensor([0.0, -3.0]), torch.tensor([3.0, 3.0]))
        >>> q.dequantize(q.quantize(torch.tensor([[0.9, 0.9], [7.0, -0.9]]))).round(decimals=3).tolist()
        [[1.0, 1.0], [3.0, -1.0]]
    """

    does_not_promise: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("L02", "L03", "L04", "L18"), "the range is that of other text"),
        "L09": "the range does not follow x", "L24": "the range does not follow x",
        **dict.fromkeys(("L05", "L08", "L19"), "each channel has its own range")}

    codebook: Codebook
    low: Tensor
    high: Tensor

    def quantize(self, x: Tensor) -> Stored:
        check_tensor(x)
        middle, half = self._range(x.dtype)
        u = torch.where(half > 0, (wide(x) - middle) / half, 0)
        return Stored({"packed": pack(self.codebook.encode(u), self.codebook.n_bits)}, tuple(x.shape), x.dtype,
                      self.codebook.n_bits)

    def dequantize(self, stored: Stored) -> Tensor:
        middle, half = self._range(stored.dtype)
        return narrow(self.codebook.decode(stored.codes(), half.dtype) * half + middle, stored.dtype)

    def _range(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        low, high = self.low.to(wide_dtype(dtype)), self.high.to(wide_dtype(dtype))
        return high / 2 + low / 2, high / 2 - low / 2


@dataclass(frozen=True, eq=False)
class TokenwiseQuantizer(Quantizer):
    """The range of each token over all of its heads, stored as a minimum and half a width, float16 both.

    As in the uniform quantizer the minimum is rounded down and the width up, so the range covers its token.

    Shapes:
        x `[..., Hkv, T, D]`; parts minimum and half `[..., 1, T, 1]`: n_bits + 32 / (Hkv * D) bits per element
    Example:
        >>> x = torch.randn(1, 3, 5, 64)
        >>> round(TokenwiseQuantizer(even_levels(3)).quantize(x).bits_per_element, 3)
        3.167
    """

    does_not_promise: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("L02", "L07", "L19"), "the heads of one token share a range"), "L03": UNEVEN, "L06": UNEVEN,
        "L08": "there is no per_channel kin of it", "L18": UNEVEN,
        "L24": "the levels are those of the token's own range"}

    codebook: Codebook

    def quantize(self, x: Tensor) -> Stored:
        check_tensor(x)
        over = (-3, -1) if x.ndim > 2 else (-1,)
        low, high = wide(x).double().amin(over, keepdim=True), wide(x).double().amax(over, keepdim=True)
        if x.numel() and max(low.abs().max(), high.abs().max(), ((high - low) / 2).max()) > 65504:
            raise KvminiError(f"a token of {low.min().item():.6g} .. {high.max().item():.6g} does not fit float16 "
                              "(largest 65504), in which its range is stored")
        minimum = round_down(low, torch.float16)
        parts = {"minimum": minimum, "half": round_up((high - minimum.double()) / 2, torch.float16)}
        middle, half = self._range(parts, x.dtype)
        u = torch.where(half > 0, (wide(x) - middle) / half, 0)
        return Stored({"packed": pack(self.codebook.encode(u), self.codebook.n_bits), **parts}, tuple(x.shape), x.dtype,
                      self.codebook.n_bits)

    def dequantize(self, stored: Stored) -> Tensor:
        middle, half = self._range(stored.parts, stored.dtype)
        return narrow(self.codebook.decode(stored.codes(), half.dtype) * half + middle, stored.dtype)

    @staticmethod
    def _range(parts: dict[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        half = parts["half"].to(wide_dtype(dtype))
        return parts["minimum"].to(half.dtype) + half, half
