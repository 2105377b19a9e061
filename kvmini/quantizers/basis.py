"""Keys, or values, in the basis in which a model makes them: XQuant's form for grouped-query attention.

A layer input x is hidden wide, its keys and its values each only Hkv * D. Where that is the smaller, XQuant caches
latents of that width and not x. This file is that, as a change of basis around any grid: an ordinary cache
(`CachePolicy`) with these quantizers on its sides. It does not measure anything: the basis is the weights'.

It is no approximation of XQuant's form but the same numbers. The projection W (`[hidden, Hkv * D]`) is U S B^T:
cached is x U, and S B^T makes keys of it. Since x W + bias = k before RoPE, x U = (k - bias) B / S. So the layer
input is not needed to have x U; the keys are enough. They must be stored before RoPE.
Next file: `quantizers/float8.py`.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvmini.errors import KvminiError
from kvmini.quantizers.base import Quantizer
from kvmini.quantizers.transformed import TransformedQuantizer, merge, unmerge

MIXES = "a latent is made of all channels of a token"


@dataclass(frozen=True, eq=False)
class BasisQuantizer(TransformedQuantizer):
    """The inner grid on latents (x - bias) @ into, which `back` turns into x - bias again.

    The Hkv * D latents of a token, largest singular value first, are cut into Hkv runs of D.

    Shapes:
        x `[..., Hkv, T, D]`; into, back `[Hkv * D, Hkv * D]`; bias `[Hkv * D]`
    Raises:
        KvminiError for a token of another number of channels.
    Source:
        XQuant (arXiv 2508.10395), its form for grouped-query attention: keys per channel, values per token.
    Example:
        >>> from kvmini.quantizers.exact import ExactQuantizer
        >>> linear, x = torch.nn.Linear(32, 8), torch.randn(5, 32)
        >>> q = BasisQuantizer.of(linear.weight.detach(), linear.bias.detach(), ExactQuantizer())
        >>> k = linear(x).detach().view(1, 5, 2, 4).transpose(1, 2)
        >>> bool((q.dequantize(q.quantize(k)) - k).abs().max() < 1e-5)
        True
    """

    does_not_promise: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("L03", "L04", "L05", "L06", "L07", "L08", "L09"), MIXES),
        **dict.fromkeys(("L11", "L16", "L18", "L19", "L23", "L24"), MIXES),
        "L02": "small numbers drown in large ones that they are mixed with",
        **dict.fromkeys(("L20", "L25"), "a product's last bit may depend on how many are multiplied, and how they lie")}

    into: Tensor
    back: Tensor
    bias: Tensor

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None, inner: Quantizer) -> "BasisQuantizer":
        """In the basis of a projection's weight `[Hkv * D, hidden]`, as `nn.Linear` has it, and bias."""
        # Paper: all outliers of key latents are in the first channel, in every layer. SmolLM2-135M: 28 of 30 layers
        # have their largest channel there, 4 to 11 times the median (before: 7 to 14 times); values have none.
        n, hidden = weight.shape
        weight = pad(weight.double(), (0, max(0, n - hidden)))  # inputs that are not there, so that n latents are
        basis, size, _ = torch.linalg.svd(weight, full_matrices=False)  # W = U diag(size) basis.T
        least = torch.finfo(torch.float32).eps * size[0]
        inverse = torch.where(size > least, 1 / size, 0)  # what no input can make has no latent
        bias = size.new_zeros(n) if bias is None else bias.double()
        return cls(inner, basis * inverse, size[:, None] * basis.T, bias)

    def forward(self, x: Tensor) -> Tensor:
        channels = merge(x).double()  # so that a code does not depend on how many tokens are multiplied at once
        if channels.shape[-1] != len(self.bias):
            raise KvminiError(f"a basis of {len(self.bias)} channels does not fit {channels.shape[-1]} of them")
        return unmerge((channels - self.bias) @ self.into, x.shape).to(x.dtype)

    def backward(self, x: Tensor) -> Tensor:
        return unmerge(merge(x).double() @ self.back + self.bias, x.shape).to(x.dtype)
