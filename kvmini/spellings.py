"""How one side of a policy is spelled: `MODIFIER+...+GRID`, from the outside in.

    hadamard+per_token:2:64           rotate, then uniform groups of 64 channels at 2 bits
    outliers+nonuniform:3             KVQuant: 1% kept apart, fitted levels for the rest

A modifier changes what the next one is given, and so what that one learns from calibration text: an order of channels
after `hadamard` is one of rotated channels. Next file: `policies.py`.
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kvmini import axes
from kvmini.calibration import Calibration, pair_factors
from kvmini.errors import KvminiError
from kvmini.quantizers import basis, float8, nonuniform, normalized, rotated, sparse
from kvmini.quantizers.base import Quantizer
from kvmini.quantizers.exact import ExactQuantizer
from kvmini.quantizers.hybrid import HybridQuantizer
from kvmini.quantizers.least_squares import LeastSquaresQuantizer
from kvmini.quantizers.transformed import TransformedQuantizer
from kvmini.quantizers.uniform import UniformQuantizer

NATURAL_AXIS = {"k": "per_channel", "v": "per_token", "x": "per_token"}
Wrap = Callable[[Quantizer], Quantizer]


@dataclass(frozen=True, eq=False)
class Sample:
    """What a layer's side was on calibration text, as the next word of a spelling is given it.

    Shapes:
        x `[Hkv, T, D]`; gradients, how much an error of each is minded, alike.
    """

    x: Tensor
    gradients: Tensor
    projection: tuple[Tensor, Tensor]

    def through(self, transform: TransformedQuantizer) -> "Sample":
        """Behind a transform, where gradients are not known element by element any more."""
        return replace(self, x=transform.forward(self.x), gradients=torch.ones_like(self.x))

    def within(self, clipped: Tensor) -> "Sample":
        """Without outliers: those that clipping moved count for nothing in a fit."""
        return replace(self, x=clipped, gradients=torch.where(clipped == self.x, self.gradients, 0))


def hadamard(side: str, sample: Sample | None) -> tuple[Wrap, Sample | None]:
    return rotated.HadamardQuantizer, sample and sample.through(rotated.HadamardQuantizer(None))


def reordered(side: str, sample: Sample) -> tuple[Wrap, Sample]:
    order = rotated.channel_order(sample.x)
    return partial(rotated.ReorderedQuantizer, order=order), sample.through(rotated.ReorderedQuantizer(None, order))


def clipped(side: str, sample: Sample | None) -> tuple[Wrap, Sample | None]:
    return rotated.ClippedQuantizer, sample


def normalized_(side: str, sample: Sample | None) -> tuple[Wrap, Sample | None]:
    return normalized.NormalizedQuantizer, None  # a sequence's own factors: what comes behind cannot be known before


def scaled(side: str, sample: Sample) -> tuple[Wrap, Sample]:
    wrap = partial(normalized.ScaledQuantizer, factor=pair_factors(sample.x))
    return wrap, sample.through(wrap(None))


def svd(side: str, sample: Sample) -> tuple[Wrap, Sample]:
    wrap = partial(basis.BasisQuantizer.of, *sample.projection)
    return wrap, sample.through(wrap(None))


def outliers(side: str, sample: Sample | None) -> tuple[Wrap, Sample | None]:
    if side == "k":
        low, high = sparse.thresholds(sample.x, sparse.SHARE)
        wrap = partial(sparse.StaticOutliers, low=low, high=high)
    else:
        wrap = sparse.TopOutliers
    return wrap, sample and sample.within(wrap(None).within(sample.x))


MODIFIERS = {"hadamard": hadamard, "reordered": reordered, "clipped": clipped, "normalized": normalized_,
             "scaled": scaled, "svd": svd, "outliers": outliers}


def nonuniform_(bits: int, side: str, sample: Sample) -> Quantizer:
    """KVQuant's levels: keys by channel, values by token; Q-Norm at 2 bits."""
    if side == "k":
        ranges = sample.x.amin(-2, keepdim=True), sample.x.amax(-2, keepdim=True)
        make = partial(nonuniform.StaticQuantizer, low=ranges[0], high=ranges[1])
    else:
        ranges = sample.x.amin((0, 2), keepdim=True), sample.x.amax((0, 2), keepdim=True)
        make = nonuniform.TokenwiseQuantizer
    half = (ranges[1] - ranges[0]) / 2
    u = torch.where(half > 0, (sample.x - ranges[0]) / half - 1, 0)
    book = nonuniform.fitted_levels(u, bits, sample.gradients * half.square())
    return make(book.normalized(u[sample.gradients > 0]) if bits == 2 else book)


def static(bits: int, side: str, sample: Sample) -> Quantizer:
    """Even levels over each channel's range on calibration text."""
    return nonuniform.StaticQuantizer(nonuniform.even_levels(bits), sample.x.amin(-2, keepdim=True),
                                      sample.x.amax(-2, keepdim=True))


def static_tensor(bits: int, side: str, sample: Sample) -> Quantizer:
    """Even levels over one range for all channels, symmetric about 0 as "per tensor" is meant."""
    size = sample.x.abs().amax().view(1, 1, 1)
    return nonuniform.StaticQuantizer(nonuniform.even_levels(bits), -size, size)


FLOAT8_SCALES = {"per_tensor": float8.scale_of, "per_head": float8.scale_of_heads}


def float8_scale(format: str, per: str | None, sample: Sample | None) -> Quantizer:
    """Scale 1, or calibrated over the tensor or over each head."""
    return float8.Float8Quantizer(format, FLOAT8_SCALES[per](sample.x, format) if per else 1.0)


CALIBRATED = {"nonuniform": nonuniform_, "static": static, "static-tensor": static_tensor}  # grids of BITS alone
UNIFORM = {"hybrid": HybridQuantizer, "least_squares": LeastSquaresQuantizer}  # of AXIS:BITS:GROUP, as the plain grid
SIDE = (f"[MODIFIER+...]GRID with MODIFIER one of {', '.join(MODIFIERS)} and GRID one of AXIS:BITS:GROUP (AXIS one of "
        f"{', '.join(axes.AXES)}), {', '.join(f'{name}:AXIS:BITS:GROUP' for name in UNIFORM)}, "
        f"{', '.join(f'{name}:BITS' for name in CALIBRATED)}, "
        f"{', '.join(float8.FORMATS)} (these two also with :{' or :'.join(FLOAT8_SCALES)}), exact, "
        "MODULE:FACTORY:BITS:GROUP, MODULE:FACTORY:AXIS:BITS:GROUP")


@dataclass(frozen=True)
class Spelled:
    """One side as it was spelled; `n_bits` and `group_size`, where given, replace its own."""

    text: str
    side: str  # k, v or x
    symmetric: bool = False
    n_bits: int | None = None
    group_size: int | None = None

    def __post_init__(self):
        for modifier in self.modifiers:
            if modifier not in MODIFIERS:
                raise KvminiError(f"unknown modifier {modifier!r} in {self.side}={self.text!r}: it must be {SIDE}")
        if self.side == "x" and self.needs_calibration:
            raise KvminiError(f"x={self.text!r} needs a calibration, which is one of keys and values only")
        _, normalized, behind = self.text.partition("normalized+")
        if normalized and Spelled(behind, self.side).needs_calibration:
            raise KvminiError(f"in {self.side}={self.text!r} nothing behind 'normalized', whose factors are each "
                              "sequence's own, can learn from calibration text: say 'scaled', or put it before")

    @property
    def modifiers(self) -> list[str]:
        return self.text.split("+")[:-1]

    @property
    def grid(self) -> list[str]:
        return self.text.split("+")[-1].split(":")

    @property
    def needs_calibration(self) -> bool:
        asks = {"reordered", "scaled", "svd"} | ({"outliers"} if self.side == "k" else set())
        kind, *words = self.grid
        return bool(asks & {*self.modifiers} or kind in CALIBRATED
                    or (kind in float8.FORMATS and words and words[0] in FLOAT8_SCALES))

    def quantizer(self, calibration: Calibration | None = None, layer: int = 0) -> Quantizer:
        """That layer's quantizer."""
        sample = None
        if calibration and self.side != "x":
            sample = Sample(*calibration.of(self.side, layer), calibration.projection(self.side, layer))
        wraps = []
        for modifier in self.modifiers:
            wrap, sample = MODIFIERS[modifier](self.side, sample)
            wraps.append(wrap)
        quantizer = self._grid(sample)
        for wrap in reversed(wraps):
            quantizer = wrap(quantizer)
        return quantizer

    def _grid(self, sample: Sample | None) -> Quantizer:
        kind, *words = self.grid
        if kind == "exact" and not words:
            return ExactQuantizer()
        if kind in float8.FORMATS and (not words or words[0] in FLOAT8_SCALES):
            return float8_scale(kind, *words or [None], sample)
        if kind in CALIBRATED and len(words) == 1:
            return CALIBRATED[kind](self._number(words[0], "bits", self.n_bits), self.side, sample)
        if kind in UNIFORM and len(words) == 3:
            return UNIFORM[kind](*self._uniform(words))
        if len(words) == 2:
            return UniformQuantizer(*self._uniform(self.grid), self.symmetric)
        if len(words) not in (3, 4):
            raise KvminiError(f"{self.side}={self.text!r} must be {SIDE}")
        return self._anybodys(f"{kind}:{words[0]}", words[1:])

    def _uniform(self, words: list[str]) -> tuple[int, str, int]:
        axis, bits, group = words
        return self._number(bits, "bits", self.n_bits), axis, self._number(group, "group", self.group_size)

    def _anybodys(self, name: str, words: list[str]) -> Quantizer:
        if self.symmetric:
            raise KvminiError(f"'symmetric' applies to the uniform quantizer only, not to {self.text!r}")
        n_bits, axis, group_size = self._uniform([NATURAL_AXIS[self.side], *words] if len(words) == 2 else words)
        try:
            return load_factory(name)(n_bits=n_bits, axis=axis, group_size=group_size)
        except (TypeError, NotImplementedError) as error:
            raise KvminiError(f"{name}(n_bits={n_bits}, axis={axis!r}, group_size={group_size}) does not work: "
                              f"{type(error).__name__}: {error}") from None

    def _number(self, text: str, what: str, instead: int | None) -> int:
        return number(text, f"{what} of {self.side}") if instead is None else instead


def number(text: str, name: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise KvminiError(f"{name} must be a whole number, not {text!r}")
    return int(text)


def load_factory(name: str):
    """What `module:attribute` names; modules are found from the current folder and PYTHONPATH."""
    module, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # whatever somebody's module does when it is imported
        raise KvminiError(f"cannot load {name!r}: {type(error).__name__}: {error}") from None
