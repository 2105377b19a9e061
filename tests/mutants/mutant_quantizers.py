"""Broken quantizers: groups, order and memory, each by one mistake, and the laws that must notice."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from mutant_grids import Clamped, Symmetric

from kvmini import Stored, UniformQuantizer, axes
from kvmini.packing import packed_size


class SharedByTheBatch(UniformQuantizer):
    """Rows of a batch share their groups (sglang #22777)."""

    def _grid(self, groups):
        low, high = groups.amin((0, -1)), groups.amax((0, -1))
        return super()._grid(torch.stack([low.expand(groups.shape[:-1]), high.expand(groups.shape[:-1])], -1))


class SharedByTheHeads(UniformQuantizer):
    """One range for a token over all heads (KVQuant's values)."""

    def _grid(self, groups):
        low, high = groups.amin(-1).amin(1, keepdim=True), groups.amax(-1).amax(1, keepdim=True)
        return super()._grid(torch.stack([low.expand(groups.shape[:-1]), high.expand(groups.shape[:-1])], -1))


class OneScaleForAll(UniformQuantizer):
    """One range for the whole tensor, written out once a group."""

    def _grid(self, groups):
        return super()._grid(torch.stack([groups.min(), groups.max()]).expand(*groups.shape[:-1], 2))


class AxesSwapped(UniformQuantizer):
    """"per channel" is understood the other way round, as in half of the literature."""

    def __init__(self, n_bits, axis, group_size):
        other = {"per_token": "per_channel", "per_channel": "per_token"}
        super().__init__(n_bits, other.get(axis, axis), group_size)


class NotTurnedBack(UniformQuantizer):
    """per_channel transposes, quantizes, and reshapes where it should transpose back."""

    def dequantize(self, stored):
        x = super().dequantize(stored)
        return axes.split(x, self.axis, self.group_size).reshape(x.shape)


class MemoryOrder(UniformQuantizer):
    """A kernel that reads memory as if x were contiguous."""

    def quantize(self, x):
        return super().quantize(x.as_strided(x.shape, torch.empty(x.shape).stride()))


class PaddedWithZeros(UniformQuantizer):
    """Any number of tokens is taken, the last group filled up with zeros, which set its range (KIVI's tables)."""

    block, cat, take = 1, None, None

    def quantize(self, x):
        missing = -x.shape[-2] % self.group_size if self.axis == "per_channel" else 0
        stored = super().quantize(F.pad(x, (0, 0, 0, missing)))
        vars(stored)["real"] = x.shape[-2]
        return stored

    def dequantize(self, stored):
        return super().dequantize(stored)[..., :vars(stored)["real"], :]


class DifferenceToTheLastToken(UniformQuantizer):
    """Differences of neighbouring tokens are stored: errors add up along the way."""

    def quantize(self, x):
        return super().quantize(x.diff(dim=-2, prepend=torch.zeros_like(x[..., :1, :])))

    def dequantize(self, stored):
        return super().dequantize(stored).cumsum(-2)


class CannotTakeNothing(UniformQuantizer):
    """A check by x.max(), which no tokens do not have."""

    def quantize(self, x):
        return super().quantize(x.clamp(max=x.max()))


class CatTurnedRound(UniformQuantizer):
    """cat puts the new tokens first."""

    def cat(self, a, b):
        return super().cat(b, a)


class StaleScale(UniformQuantizer):
    """cat gives new tokens the scales of the last ones it had (a static scale, found at prefill)."""

    def cat(self, a, b):
        old = {name: a.parts[name][..., -1:, :].expand_as(b.parts[name]) for name in ("scale", "minimum")}
        return super().cat(a, replace(b, parts={**b.parts, **old}))


class RowsOfCodesOnly(UniformQuantizer):
    """take(rows) moves the codes and leaves the scales (beams)."""

    def take(self, stored, rows=None, blocks=None):
        taken = super().take(stored, rows, blocks)
        return taken if rows is None else replace(taken, parts={**stored.parts, "packed": taken.parts["packed"]})


class TakesAView(UniformQuantizer):
    """take(blocks) cuts by a slice: what was dropped stays alive behind it."""

    def take(self, stored, rows=None, blocks=None):
        taken = super().take(stored, rows, blocks)
        if blocks is not None:
            for name, part in taken.parts.items():
                taken.parts[name] = stored.parts[name][..., :part.shape[-2], :]
        return taken


class AffineForgetsTheZero(Symmetric):
    """affine starts a symmetric grid at 0."""

    def affine(self, stored):
        return stored.parts["packed"], stored.scale, torch.zeros_like(stored.scale)


# --- memory, and what is returned

class Float32Returned(UniformQuantizer):
    """Whatever came, float32 comes back."""

    def dequantize(self, stored):
        return super().dequantize(stored).float()


class ChangesItsInput(UniformQuantizer):
    """x -= minimum, in place."""

    def quantize(self, x):
        stored = super().quantize(x)
        axes.split(x, self.axis, self.group_size).sub_(stored.minimum[..., None])
        return stored


class KeepsAView(UniformQuantizer):
    """The first token stays exact, as a view of x."""

    def quantize(self, x):
        stored = super().quantize(x)
        stored.parts["sink"] = x[..., :1, :]
        return stored

    def dequantize(self, stored):
        x = super().dequantize(stored).clone()
        x[..., :1, :] = stored.parts["sink"]
        return x


class ShiftsItsCodes(Symmetric):
    """dequantize subtracts the zero from the stored codes themselves: a second read is another one."""

    class Bytes(Stored):
        def codes(self):
            return self.parts["packed"]

    def quantize(self, x):
        stored = super().quantize(x)
        return self.Bytes(**{**vars(stored), "parts": {**stored.parts, "packed": stored.codes().to(torch.int16)}})

    def dequantize(self, stored):
        stored.codes().sub_(self.zero_code)
        codes = axes.split(stored.codes(), self.axis, self.group_size)
        return axes.join((codes * stored.scale.double()[..., None]).to(stored.dtype), self.axis, stored.shape)


class RunningRange(UniformQuantizer):
    """The widest range seen so far, as an observer keeps it."""

    def _grid(self, groups):
        low, high = groups.amin(-1), groups.amax(-1)
        old = vars(self).get("range", (low, high))
        if old[0].shape == low.shape:
            low, high = torch.minimum(low, old[0]), torch.maximum(high, old[1])
        vars(self)["range"] = low, high
        return super()._grid(torch.stack([low, high], -1))


class CalibratedOnce(Clamped):
    """The grid of the first call serves all later ones (InnerQ's norms, KVQuant's keys)."""

    def _grid(self, groups):
        grid = super()._grid(groups)
        first = vars(self).setdefault("grid", grid)
        return first if first["scale"].shape == grid["scale"].shape else grid


class FakeQuantized(UniformQuantizer):
    """Codes are billed; what is read is a float copy."""

    def quantize(self, x):
        stored = super().quantize(x)
        vars(stored)["x_hat"] = super().dequantize(stored)
        return stored

    def dequantize(self, stored):
        return vars(stored)["x_hat"]


class RemembersWhatItRead(UniformQuantizer):
    """The first dequantize is kept with what was stored, for the next one."""

    def dequantize(self, stored):
        return vars(stored).setdefault("x_hat", super().dequantize(stored))


class ScalesNotBilled(UniformQuantizer):
    """nbytes is that of the codes: "2 bits" that are 3."""

    class Bill(Stored):
        nbytes = property(lambda self: self.parts["packed"].nbytes)

    def quantize(self, x):
        return self.Bill(**vars(super().quantize(x)))


class BytesBilledAsBits(UniformQuantizer):
    """A byte a code, and n_bits on the bill."""

    class Bill(Stored):
        @property
        def nbytes(self):
            rows = self.n_elements // self.shape[-1]
            return rows * packed_size(self.shape[-1], self.n_bits) + self.scale.nbytes + self.minimum.nbytes

        def codes(self):
            return self.parts["packed"]

    def quantize(self, x):
        stored = super().quantize(x)
        return self.Bill(**{**vars(stored), "parts": {**stored.parts, "packed": stored.codes().clone()}})


class NotPacked(UniformQuantizer):
    """A byte a code, honestly billed."""

    def quantize(self, x):
        stored = super().quantize(x)
        return replace(stored, parts={**stored.parts, "packed": stored.codes().clone()}, n_bits=8)


KILLED_BY = {
    SharedByTheBatch: "L07", SharedByTheHeads: "L07", OneScaleForAll: "L23", AxesSwapped: "L07", NotTurnedBack: "L03",
    MemoryOrder: "L25", PaddedWithZeros: "L20", DifferenceToTheLastToken: "L19", CannotTakeNothing: "L22",
    CatTurnedRound: "L20", StaleScale: "L20", RowsOfCodesOnly: "L20", TakesAView: "L14", AffineForgetsTheZero: "L16",
    Float32Returned: "L01", ChangesItsInput: "L25", KeepsAView: "L25", ShiftsItsCodes: "L25", RunningRange: "L25",
    CalibratedOnce: "L25", FakeQuantized: "L14", RemembersWhatItRead: "L14", ScalesNotBilled: "L14",
    BytesBilledAsBits: "L14", NotPacked: "L27",
}
