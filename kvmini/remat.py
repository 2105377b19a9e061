"""Rematerialisation: keep the input of a layer's attention, and compute its keys and values again when they are needed.

Keys and values are two projections of one vector, the normed input of their layer (`layer_input`). With as many
key/value heads as query heads that vector is half as many numbers as K and V; with grouped-query attention it may be
more (SmolLM2-135M: 576 against 384), and then the latents of `quantizers/basis.py` in an ordinary cache are the
form to use. What is saved in bytes is paid in work: each step projects all live tokens again.

It does not keep differences between layers (XQuant-CL). Next file: `model.py`.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from kvmini.attention import View
from kvmini.cache import KVCache, check_policy
from kvmini.errors import KvminiError
from kvmini.quantizers.base import Stored
from kvmini.rope import Rope
from kvmini.side import Side
from kvmini.store import QuantizedStore, check_fits


@dataclass(frozen=True)
class RematPolicy:
    """One side, for the layer input; the first `sinks` tokens exact; `prefill` as in `CachePolicy`.

    Raises:
        KvminiError for a negative number of sinks or an unknown prefill mode.
    Source:
        XQuant (arXiv 2508.10395), section 3: per_token groups of 128, up to 128 recent tokens exact.
    Example:
        >>> from kvmini import UniformQuantizer
        >>> RematPolicy(Side(UniformQuantizer(2, "per_token", 128), residual_length=128)).prefill
        'exact'
    """

    layer_input: Side
    sinks: int = 0
    prefill: str = "exact"
    pre_rope: ClassVar[bool] = True  # a layer input knows nothing of positions

    def __post_init__(self):
        check_policy(self.sinks, self.prefill)

    @property
    def sides(self) -> dict[str, Side]:
        return {"layer_input": self.layer_input}

    def new_cache(self, model) -> "XCache":
        """An empty cache of this policy for a `Llama`."""
        projections = [(layer.attention.k, layer.attention.v) for layer in model.layers]
        return XCache(projections, model.config.rope, self)


class XCache(KVCache):
    """The quantized cache with one side, the layer input: sinks | packed body | recent window, then projected.

    `projections` are each layer's own for keys and for values, biases included; their weights are the model's and
    are not counted. Figures in bits are over the elements of K and V, so that they compare with other caches'.

    Shapes:
        as in `KVCache`, and layer_input `[B, S, hidden]`, which its store holds as one head `[B, 1, T, hidden]`.
        k and v of a call are looked at for their shapes alone.
    Raises:
        KvminiError as `KVCache` does, and for a layer input that is missing or does not fit k.
    Source:
        XQuant (arXiv 2508.10395), section 3.
    Example:
        >>> import torch
        >>> from kvmini import UniformQuantizer
        >>> policy = RematPolicy(Side(UniformQuantizer(2, "per_token", 16)))
        >>> cache = XCache([(nn.Linear(16, 8), nn.Linear(16, 8))], Rope(head_dim=4), policy)
        >>> k = v = torch.zeros(1, 2, 5, 4)
        >>> keys, values = cache.append(0, k, v, layer_input=torch.randn(1, 5, 16))
        >>> tuple(keys.tokens.shape), cache.nbytes, cache.body_bits_per_element    # 16 numbers a token, not 2 * 2 * 4
        ((1, 2, 5, 4), 40, 4.0)
    """

    pre_rope = True  # keys come out of their projection unrotated

    def __init__(self, projections: list[tuple[nn.Linear, nn.Linear]], rope: Rope, policy: RematPolicy):
        self.projections, self.rope = projections, rope
        self.inputs = [QuantizedStore(policy.layer_input, n, policy.sinks, policy.prefill)
                       for n in range(len(projections))]

    def sides(self) -> dict[str, list[QuantizedStore]]:
        return {"layer input": self.inputs}

    def _kept(self, layer: int, k: Tensor, v: Tensor, layer_input: Tensor | None) -> tuple[Tensor, ...]:
        B, _, S, _ = k.shape
        wanted = (k.dtype, (B, S, self.projections[layer][0].in_features))
        found = layer_input is not None and (layer_input.dtype, tuple(layer_input.shape))
        if found != wanted:
            raise KvminiError(f"rematerialisation needs the layer input, {wanted[0]} {list(wanted[1])} for these keys, "
                              f"not {f'{found[0]} {list(found[1])}' if found else None}")
        x = layer_input[:, None]  # [B, 1, S, hidden]
        check_fits(self.inputs[layer], x)
        return (x,)

    def _seen(self, layer: int, x: View) -> tuple[View, View]:
        k, v = self.projections[layer]
        return super()._seen(layer, x.map(lambda x: self._heads(k(x))), x.map(lambda x: self._heads(v(x))))

    def _heads(self, x: Tensor) -> Tensor:
        """`[B, 1, T, Hkv * D]` -> `[B, Hkv, T, D]`"""
        return x[:, 0].unflatten(-1, (-1, self.rope.head_dim)).transpose(1, 2)

    def _elements(self, parts: list[QuantizedStore] | list[Stored]) -> int:
        k, v = self.projections[0]
        return super()._elements(parts) * (k.out_features + v.out_features) // k.in_features
