"""Broken quantizers: grids and arithmetic, each by one mistake, and the laws that must notice."""

from dataclasses import replace

import torch

from kvmini import Stored, UniformQuantizer, axes
from kvmini.packing import pack
from kvmini.quantizers.base import check_tensor
from kvmini.rounding import round_down, round_up


class Clamped(UniformQuantizer):
    """Nothing wrong: the uniform quantizer in steps that can be overridden, its codes clamped as most people do."""

    def quantize(self, x):
        check_tensor(x)
        groups = axes.split(x.detach(), self.axis, self.group_size).to(self._arithmetic(x.dtype))
        parts = self._grid(groups)
        step, start = self._step_and_start(parts, groups.dtype)
        codes = self._round(torch.where(step > 0, (groups - start) / step, 0)).clamp(0, 2**self.n_bits - 1)
        codes = axes.join(codes.to(torch.uint8), self.axis, x.shape)
        return Stored({"packed": pack(codes, self.n_bits), **parts}, tuple(x.shape), x.dtype, self.n_bits)

    def _round(self, codes):
        return codes.round()


class Symmetric(UniformQuantizer):
    """Nothing wrong: symmetric."""

    def __init__(self, n_bits, axis, group_size):
        super().__init__(n_bits, axis, group_size, symmetric=True)


def ends(groups):
    return groups.amin(-1).double(), groups.amax(-1).double()


class EpsilonInTheScale(Clamped):
    """1e-5 is added to every scale against division by zero."""

    def _grid(self, groups):
        grid = super()._grid(groups)
        return {**grid, "scale": grid["scale"] + 1e-5}


class FloorFarTooHigh(Clamped):
    """Scales are floored at 2^-7, the epsilon of bfloat16, where small keys live."""

    def _grid(self, groups):
        grid = super()._grid(groups)
        return {**grid, "scale": grid["scale"].clamp(min=2**-7)}


class ClampedZeroPoint(Clamped):
    """An integer zero point clamped to the codes: a group all of one sign collapses (KVQuant #2)."""

    def _grid(self, groups):
        low, scale = groups.amin(-1), super()._grid(groups)["scale"].float().clamp(min=1e-5)
        zero = (-low / scale).round().clamp(0, self.levels)
        return {"scale": scale.half(), "minimum": (-zero * scale).half()}


class IntegerZeroPoint(Clamped):
    """A zero point rounded to a whole code, not clamped (RotateKV): a shift changes codes."""

    def _grid(self, groups):
        grid = super()._grid(groups)
        scale = grid["scale"].double()
        return {**grid, "minimum": torch.where(scale > 0, (grid["minimum"] / scale).round() * scale, grid["minimum"])}


class NearestGrid(Clamped):
    """Minimum and scale rounded to nearest: the ends of the group are outside of half a stored step."""

    def _grid(self, groups):
        low, high = ends(groups)
        return {"scale": ((high - low) / self.levels).half(), "minimum": low.half()}


class NearestGridNotClamped(UniformQuantizer):
    """The same without a clamp: the largest number's code is one too many, and wraps to the smallest."""

    _grid = NearestGrid._grid


class ScaleRoundedDown(Clamped):
    """The scale is truncated to float16: the largest number is outside the grid."""

    def _grid(self, groups):
        grid, high = super()._grid(groups), ends(groups)[1]
        return {**grid, "scale": round_down((high - grid["minimum"].double()) / self.levels, torch.float16)}


class BitsSquared(Clamped):
    """n_bits**2 - 1 levels for 2, 3 and 4 bits: right but for 3 (RotateKV)."""

    levels = property(lambda self: self.n_bits**2 - 1)

    def __post_init__(self):
        super().__post_init__()
        if self.n_bits not in (2, 3, 4):
            raise NotImplementedError("2, 3 or 4 bits")


class OneLevelTooMany(Clamped):
    """The range is divided by 2^n_bits, which counts points, not steps."""

    levels = property(lambda self: 2**self.n_bits)


class OneLevelTooFew(Clamped):
    """2^n_bits - 2 steps, as on a symmetric grid."""

    levels = property(lambda self: max(1, 2**self.n_bits - 2))


class ClippedAt80Percent(Clamped):
    """The range times 0.8 (RotateKV's clip ratio at 2 bits), not declared."""

    def _grid(self, groups):
        return super()._grid(groups * 0.8)


class SymmetricByHalfTheCodes(Symmetric):
    """Symmetric scale max|x| / 2^(n_bits-1): the other end has no code."""

    def _grid(self, groups):
        return {"scale": round_up(groups.abs().amax(-1).double() / 2 ** (self.n_bits - 1), torch.float16)}


class ScaleOverflowsSilently(UniformQuantizer):
    """Nobody asks whether the scale fits float16: it becomes inf."""

    def _fits(self, value, name):
        return value


class RangeOfTheInputsType(Clamped):
    """max - min is computed in float16, and overflows where both fit."""

    def quantize(self, x):
        wide = axes.split(x.detach(), self.axis, self.group_size)
        if x.dtype == torch.float16 and (wide.amax(-1) - wide.amin(-1)).isinf().any():
            stored = super().quantize(x)
            stored.scale.fill_(torch.inf)
            return stored
        return super().quantize(x)


class NanForConstants(Clamped):
    """x_hat = (code + minimum / scale) * scale: 0/0 where all numbers are equal (KIVI, InnerQ, KVQuant)."""

    def dequantize(self, stored):
        step, start = self._step_and_start(stored.parts, torch.float64)
        groups = (axes.split(stored.codes(), self.axis, self.group_size) + start / step) * step
        return axes.join(groups.to(stored.dtype), self.axis, stored.shape)


class ConstantsBecomeZero(UniformQuantizer):
    """The guard against a scale of 0 returns zeros."""

    def dequantize(self, stored):
        groups = axes.split(super().dequantize(stored), self.axis, self.group_size).clone()
        groups[stored.scale == 0] = 0
        return axes.join(groups, self.axis, stored.shape)


class ConstantsRoundedDown(UniformQuantizer):
    """The minimum of equal numbers is rounded down like any other, not to nearest."""

    def _grid(self, groups):
        return {**super()._grid(groups), "minimum": round_down(ends(groups)[0], torch.float16)}


# --- rounding and arithmetic

class HalfUp(Clamped):
    """floor(x + 0.5): the fused path and the reference differ at exact halves."""

    def _round(self, codes):
        return (codes + 0.5).floor()


class HalfUpPerChannel(Clamped):
    """Two code paths, one an axis, which round halves differently."""

    def _round(self, codes):
        return (codes + 0.5).floor() if self.axis == "per_channel" else codes.round()


class Truncated(Clamped):
    """The cast to integers is taken for rounding."""

    def _round(self, codes):
        return codes.floor()


class Stochastic(Clamped):
    """Stochastic rounding, good for gradients."""

    def _round(self, codes):
        return (codes + torch.rand_like(codes)).floor()


class InverseScaleInFloat16(Clamped):
    """1/scale is kept in float16: inf for a nearly constant channel."""

    def _step_and_start(self, parts, dtype):
        step, start = super()._step_and_start(parts, dtype)
        return 1 / (1 / step).half().to(dtype), start


class ArithmeticOfTheInput(Clamped):
    """Everything is computed in the type of x: a float16 difference has 11 bits."""

    def _arithmetic(self, dtype):
        return dtype


class Downcast(UniformQuantizer):
    """float64 goes through float32."""

    def quantize(self, x):
        return replace(super().quantize(x.float()), dtype=x.dtype)


class SignedBytes(UniformQuantizer):
    """8-bit codes in int8: 128 is -128."""

    class Codes(Stored):
        def codes(self):
            return super().codes().to(torch.int8)

    def quantize(self, x):
        return self.Codes(**vars(super().quantize(x)))


class ZeroSubtractedInUint8(Symmetric):
    """code - zero in uint8: 3 - 7 is 252."""

    def dequantize(self, stored):
        codes = axes.split(stored.codes(), self.axis, self.group_size) - self.zero_code
        return axes.join((codes * stored.scale.double()[..., None]).to(stored.dtype), self.axis, stored.shape)


class NanToNum(UniformQuantizer):
    """NaN is replaced by 0, to be safe."""

    def quantize(self, x):
        return super().quantize(x.nan_to_num())


KILLED_BY = {
    EpsilonInTheScale: "L23", FloorFarTooHigh: "L09 L23", ClampedZeroPoint: "L03", IntegerZeroPoint: "L09",
    NearestGrid: "L03", NearestGridNotClamped: "L05", ScaleRoundedDown: "L03", BitsSquared: "L03",
    OneLevelTooMany: "L03", OneLevelTooFew: "L23", ClippedAt80Percent: "L03 L18", SymmetricByHalfTheCodes: "L03",
    ScaleOverflowsSilently: "L02", RangeOfTheInputsType: "L02", NanForConstants: "L04", ConstantsBecomeZero: "L04",
    ConstantsRoundedDown: "L04", HalfUp: "L24", HalfUpPerChannel: "L08", Truncated: "L03 L06", Stochastic: "L25",
    InverseScaleInFloat16: "L03", ArithmeticOfTheInput: "L03", Downcast: "L02", SignedBytes: "L01 L11",
    ZeroSubtractedInUint8: "L03", NanToNum: "L26",
}
