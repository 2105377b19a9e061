"""No quantization at all, as a quantizer: for a layer that is to stay exact, and to prove that a wrapper is one.

Next file: `quantizers/transformed.py`.
"""

from torch import Tensor

from kvmini.quantizers.base import Quantizer, Stored, check_tensor


class ExactQuantizer(Quantizer):
    """Keeps every number as it is, and counts it with all its bits.

    Example:
        >>> import torch
        >>> x = torch.randn(1, 2, 5, 8)
        >>> stored = ExactQuantizer().quantize(x)
        >>> torch.equal(ExactQuantizer().dequantize(stored), x), stored.bits_per_element
        (True, 32.0)
    """

    def quantize(self, x: Tensor) -> Stored:
        check_tensor(x)
        return Stored({"x": x.detach().clone()}, tuple(x.shape), x.dtype, n_bits=8 * x.element_size())

    def dequantize(self, stored: Stored) -> Tensor:
        return stored.parts["x"]
