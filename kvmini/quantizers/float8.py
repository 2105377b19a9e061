"""FP8: eight bits with an exponent, the quantized cache that vLLM offers.

The steps of such a grid grow with the numbers: an error follows its own number's size, not its group's. So nothing
is stored beside the codes and no token waits. The scale is chosen beforehand: too small, it cuts off the largest
numbers; too large, it loses the smallest. The bytes are those of torch's float8 types, worked out by hand, but what
is too large becomes the largest number, never NaN or inf. It does not attend in eight bits or measure scales as it
runs. Next file: `calibration.py`.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from kvmini.errors import KvminiError
from kvmini.quantizers.base import Quantizer, Stored, check_tensor
from kvmini.quantizers.transformed import narrow, wide, wide_dtype

FORMATS = {"e4m3": (3, -6, 448.0), "e5m2": (2, -14, 57344.0)}  # mantissa bits, lowest exponent, largest number


@dataclass(frozen=True, eq=False)
class Float8Quantizer(Quantizer):
    """Each number over a static scale, rounded to "e4m3" (OCP's e4m3fn) or to the coarser, wider "e5m2".

    `scale` is a constant of a model as its weights are: it is not in what is stored, and not counted.

    Shapes:
        x `[..., T, D]`; scale one number, or a tensor that broadcasts to `[Hkv, 1, D]`: `[Hkv, 1, 1]` per head
    Math:
        y = x / scale, clamped to the largest; step = 2^(max(floor(log2|y|), lowest exponent) - mantissa bits);
        x_hat = rint(y / step) * step * scale, off by |x|/16 (e4m3) or |x|/8 (e5m2) if not subnormal or clamped.
    Raises:
        KvminiError for an unknown format, a scale that is no positive finite float32 or does not fit x, NaN or inf.
    Source:
        FP8 Formats for Deep Learning (arXiv 2209.05433), section 3; vLLM, Quantized KV Cache, for the scale.
    Example:
        >>> q = Float8Quantizer("e4m3", scale=2.0)
        >>> stored = q.quantize(torch.tensor([[2.0, 2.1, -2.2, 1e4]]))
        >>> [hex(code) for code in stored.codes()[0]], q.dequantize(stored).tolist()
        (['0x38', '0x38', '0xb9', '0x7e'], [[2.0, 2.0, -2.25, 896.0]])
    """

    does_not_promise: ClassVar[dict[str, str]] = {
        "L03": "an error follows the size of its own number, not its group's range",
        "L09": "a power of two changes the exponent, which is part of the code",
        "L18": "errors are not half steps of a grid that its group shares"}

    format: str = "e4m3"
    scale: Tensor | float = 1.0

    def __post_init__(self):
        numbers(self.format)  # raises
        scale = torch.as_tensor(self.scale if isinstance(self.scale, Tensor | float | int) else torch.nan).float()
        if not (scale.isfinite() & (scale > 0)).all():
            raise KvminiError(f"scale must be positive and finite in float32, not {self.scale!r}")

    def quantize(self, x: Tensor) -> Stored:
        check_tensor(x)
        bits, lowest, largest = FORMATS[self.format]
        size = (wide(x) / self._scale(x, x.dtype)).abs().clamp(max=largest)
        normal = size.clamp(min=2.0**lowest)
        fraction, exponent = torch.frexp(normal)  # fraction in [1/2, 1), so exponent - 1 is floor(log2)
        step = normal / fraction * 2.0**(-1 - bits)  # a power of two, exactly
        # Codes count the numbers from zero up, 2^bits of them to an exponent: rounding up into the next needs no carry.
        codes = (exponent - 1 - lowest) * 2**bits + (size / step).round().int() + 128 * x.signbit().int()
        return Stored({"packed": codes.to(torch.uint8)}, tuple(x.shape), x.dtype, n_bits=8)

    def dequantize(self, stored: Stored) -> Tensor:
        scale = self._scale(stored.codes(), stored.dtype)
        return narrow(numbers(self.format).to(scale)[stored.codes().int()] * scale, stored.dtype)

    def _scale(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        # A tensor on that device, even if one number: by a plain number, a GPU multiplies by its rounded reciprocal.
        scale = torch.as_tensor(self.scale, dtype=wide_dtype(dtype), device=like.device).detach()
        try:
            scale.expand(*like.shape[-3:-2], 1, like.shape[-1])
        except RuntimeError:
            raise KvminiError(f"a scale {[*scale.shape]} does not fit {[*like.shape]}: one for all tokens") from None
        return scale


@lru_cache
def numbers(format: str) -> Tensor:
    """What each of the 256 codes means, float64; NaN for those past the largest number, which are never written."""
    if format not in FORMATS:
        raise KvminiError(f"format must be one of {', '.join(FORMATS)}, not {format!r}")
    bits, lowest, largest = FORMATS[format]
    steps = [code % 2**bits + (2**bits if code >= 2**bits else 0) for code in range(128)]  # with the leading one
    sizes = torch.tensor([n * 2.0**(max(code >> bits, 1) - 1 + lowest - bits) for code, n in enumerate(steps)])
    return torch.cat([sizes, -sizes]).where(torch.cat([sizes, sizes]) <= largest, torch.nan).double()


def scale_of(x: Tensor, format: str) -> Tensor:
    """The scale at which the largest magnitude of x `[..., T, D]` is the format's largest number; 1 for zeros."""
    check_tensor(x)
    if not x.numel():
        raise KvminiError("a scale cannot be calibrated on no numbers")
    scale = wide(x).abs().max() / numbers(format).nan_to_num().max().item()
    return scale.clamp(2.0**-149, torch.finfo(torch.float32).max).where(x.any(), 1)  # in float32 neither 0 nor inf


def scale_of_heads(x: Tensor, format: str) -> Tensor:
    """The same for each head alone: x `[..., Hkv, T, D]` -> `[Hkv, 1, 1]`."""
    if x.ndim < 3:
        raise KvminiError(f"there are no heads in a tensor {list(x.shape)}")
    return torch.stack([scale_of(head, format) for head in x.unbind(-3)])[:, None, None]
