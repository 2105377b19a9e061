"""The grid with the least stored error: scale and minimum by least squares. A question, not a recommendation.

The article's point is that the stored error is not what a model feels. Here the grid itself is the test: it makes
that error as small as an even grid can, at the price of the ends of the group. Next file: `quantizers/basis.py`.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvmini import axes
from kvmini.packing import pack
from kvmini.quantizers.base import Stored
from kvmini.quantizers.uniform import UniformQuantizer

ROUNDS = 8  # of codes from the grid, and the grid from the codes


@dataclass(frozen=True)
class LeastSquaresQuantizer(UniformQuantizer):
    """The asymmetric uniform quantizer, its scale and minimum then fitted to its codes, and its codes to them.

    Math:
        with codes c: scale = cov(c, x) / var(c), minimum = mean(x) - scale * mean(c); code = rint((x - min) / scale)
        clamped to 0 .. L; a few times. Both are rounded to `scale_dtype` in the ordinary way: a group whose ends are
        cut off need not be covered.
    Example:
        >>> x = torch.tensor([[0.0, 0.1, 0.9, 1.1, 2.0, 2.0, 3.0, 4.0]])
        >>> errors = [(q(2, "per_token", 8).dequantize(q(2, "per_token", 8).quantize(x)) - x).square().sum().item()
        ...           for q in (UniformQuantizer, LeastSquaresQuantizer)]
        >>> errors[1] < errors[0]
        True
    """

    does_not_promise: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("L03", "L18"), "the ends of a group may be further off, for the sake of the others"),
        "L06": "the grid is fitted again", "L09": "its iteration may end elsewhere",
        "L11": "more bits make the sum better, not every element",
        "L23": "the fitted scale may be the wider one", "L24": "levels are fitted, not given"}

    def quantize(self, x: Tensor) -> Stored:
        stored = super().quantize(x)
        groups, codes = (axes.split(t, self.axis, self.group_size).double().contiguous()  # one order of sums
                         for t in (x.detach(), stored.codes()))
        parts = stored.parts
        best = self._error(groups, codes, parts)
        for _ in range(ROUNDS):
            mean, spread = groups.mean(-1, keepdim=True), codes - codes.mean(-1, keepdim=True)
            variance = spread.square().sum(-1)
            scale = torch.where(variance > 0, (spread * (groups - mean)).sum(-1) / variance, 0)
            found = {"scale": scale.to(self.scale_dtype),
                     "minimum": (mean[..., 0] - scale * codes.mean(-1)).to(self.scale_dtype)}
            step, start = self._step_and_start(found, torch.float64)
            now = torch.where(step > 0, (groups - start) / step, 0).round().clamp(0, self.levels)
            error = self._error(groups, now, found)
            better = error < best
            best = torch.where(better, error, best)
            parts = {name: torch.where(better, found[name], parts[name]) for name in found}
            codes = torch.where(better[..., None], now, codes)
        packed = pack(axes.join(codes.to(torch.uint8), self.axis, x.shape), self.n_bits)
        return Stored({"packed": packed, **parts}, stored.shape, stored.dtype, stored.n_bits)

    def _error(self, groups: Tensor, codes: Tensor, parts: dict[str, Tensor]) -> Tensor:
        step, start = self._step_and_start(parts, torch.float64)
        return (codes * step + start - groups).square().sum(-1)
