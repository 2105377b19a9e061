"""Public quantizers and caches under the same laws, each called as its documentation says.

An adapter maps what a package groups onto `per_token` (G channels of a token) or `per_channel` (G tokens of a channel)
and shows what the package shows. NotImplementedError: that it cannot be asked for. `does_not_promise` names the laws
that a package gives up on purpose. Packages are imported when an adapter is made. Next file: `report.py`.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvmini import axes
from kvmini.cache import CachePolicy
from kvmini.packing import pack, unpack
from kvmini.rope import Rope


@dataclass(frozen=True, eq=False)
class Held:
    """What is kept of one tensor, and what of that can be looked at."""

    kept: Any  # as the package hands it out
    shape: torch.Size
    dtype: torch.dtype
    parts: tuple[Tensor, ...]
    codes: Callable[[], Tensor]
    scale: Tensor

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class Adapter:
    """A quantizer of `module` with a scale for each group."""

    module: ClassVar[str | None] = None
    bits: ClassVar[tuple[int, ...]]
    does_not_promise: ClassVar[dict[str, str]] = {}
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16, torch.float32)

    def __init__(self, n_bits: int, axis: str, group_size: int):
        if axis == "per_tensor":
            raise NotImplementedError("it has no layout with one scale for each batch row")
        if n_bits not in self.bits:
            raise NotImplementedError(f"it takes {', '.join(map(str, self.bits))} bits")
        self.n_bits, self.axis, self.group_size = n_bits, axis, group_size
        self.block = axes.block(axis, group_size)
        self.package = self.module and importlib.import_module(self.module)

    def quantize(self, x: Tensor) -> Held:
        if x.dtype not in self.dtypes:
            raise NotImplementedError(f"it is judged in {' and '.join(map(str, self.dtypes))}")
        return self.hold(x)

    def join(self, groups: Tensor, shape: torch.Size) -> Tensor:
        """Groups, one after another, as a tensor of that shape."""
        return axes.join(groups.reshape(*self.one_a_group(shape), self.group_size), self.axis, shape)

    def one_a_group(self, shape: torch.Size) -> tuple[int, ...]:
        """The shape of one number a group."""
        (*lead, T, D), G = shape, self.group_size
        return (*lead, T, D // G) if self.axis == "per_token" else (*lead, T // G, D)


class Quanto(Adapter):
    """optimum-quanto's group-wise weights, with the optimizer that transformers' cache takes."""

    module, bits = "optimum.quanto", (2, 4)
    does_not_promise: ClassVar = {"L22": "made for weights, which are never empty"}

    def hold(self, x: Tensor) -> Held:
        quanto, shape, axis = self.package, x.shape, 0 if self.axis == "per_token" else -1
        if axis == 0 and x.numel() == self.group_size:
            raise NotImplementedError("a group that is alone at axis 0 is not quantized: it gets a scale an element")
        qtype = {2: quanto.qint2, 4: quanto.qint4}[self.n_bits]
        scale, shift = quanto.MaxOptimizer()(x, qtype, axis, self.group_size)
        kept = quanto.quantize_weight(x, qtype, axis, scale, shift, self.group_size)
        scale = kept._scale.reshape(shape[-1], -1).T if axis else kept._scale  # at axis -1 channels are outermost
        return Held(kept, shape, x.dtype, (kept._data._data, kept._scale, kept._shift),
                    lambda: quanto.ungroup(kept._data.unpack(), axis, shape), scale.reshape(self.one_a_group(shape)))

    def dequantize(self, held: Held) -> Tensor:
        return held.kept.dequantize()


class HQQ(Adapter):
    """HQQ's quantizer with its solver, and scale and zero in the type of the input, as in transformers' cache."""

    module, bits = "hqq.core.quantize", (1, 2, 3, 4, 8)
    does_not_promise: ClassVar = {
        "L04": "(code - zero) * scale is rounded twice",
        "L03": (solver := "its solver moves each zero to lower the mean error, not the largest"), "L18": solver,
        "L08": (order := "what its solver sums depends in the last bit on the order of the numbers"), "L19": order,
        "L09": "what its solver shrinks by, and the narrowest group that it resolves, are absolute numbers",
        "L11": "its solver fits the zero of every width anew", "L24": "its solver moves the points of its grid",
        "L27": "at 3 bits ten codes fill an int32"}

    def __init__(self, n_bits: int, axis: str, group_size: int):
        super().__init__(n_bits, axis, group_size)
        if axis == "per_channel" and n_bits != 3 and group_size * n_bits % 8:
            raise NotImplementedError(f"at axis 0 it packs whole bytes along a group: {group_size} codes fill none")

    def hold(self, x: Tensor) -> Held:
        hqq, shape = self.package.Quantizer, x.shape
        matrix, axis = axes.split(x, self.axis, self.group_size).flatten(0, -2), 1
        if self.axis == "per_channel":
            matrix, axis = matrix.T, 0
        elif self.n_bits != 3 and len(matrix) * self.n_bits % 8:
            raise NotImplementedError("at axis 1 it packs whole bytes across groups, and fails without")
        kept, meta = hqq.quantize(matrix.contiguous(), nbits=self.n_bits, group_size=self.group_size, axis=axis,
                                  device=x.device, compute_dtype=x.dtype)
        kept, meta = hqq.cuda(kept, {**meta, "compute_dtype": x.dtype}, x.device)
        return Held((kept, meta), shape, x.dtype, (kept, meta["scale"], meta["zero"]),
                    lambda: self._join(hqq.unpack[meta["packing"]](kept)[:meta["shape"][0]], shape),
                    meta["scale"].reshape(self.one_a_group(shape)))

    def dequantize(self, held: Held) -> Tensor:
        return self._join(self.package.Quantizer.dequantize(*held.kept), held.shape)

    def _join(self, matrix: Tensor, shape: torch.Size) -> Tensor:
        return self.join(matrix.T if self.axis == "per_channel" else matrix, shape)


class TorchAO(Adapter):
    """torchao's affine primitives: asymmetric, a block a group, everything else as by default."""

    module, bits = "torchao.quantization.quant_primitives", (2, 4, 8)
    does_not_promise: ClassVar = dict.fromkeys(("L04", "L09", "L11", "L23", "L24"), "its grid goes through zero") | {
        "L22": "made for weights, which are never empty", "L27": "its primitives leave a code in a byte, unpacked"}

    def __init__(self, n_bits: int, axis: str, group_size: int):
        super().__init__(n_bits, axis, group_size)
        self.block_size = (1, 1, 1, group_size) if axis == "per_token" else (1, 1, group_size, 1)
        self.range = torch.uint8, 0, 2**n_bits - 1

    def hold(self, x: Tensor) -> Held:
        x = x.contiguous()
        scale, zero = self.package.choose_qparams_affine(x, self.package.MappingType.ASYMMETRIC, self.block_size,
                                                         *self.range, keepdim=True)
        codes = self.package.quantize_affine(x, self.block_size, scale, zero, *self.range)
        return Held((codes, scale, zero), x.shape, x.dtype, (codes, scale, zero), lambda: codes, scale)

    def dequantize(self, held: Held) -> Tensor:
        codes, scale, zero = held.kept
        return self.package.dequantize_affine(codes, self.block_size, scale, zero, *self.range, output_dtype=held.dtype)


class KIVI(Adapter):
    """KIVI's formula (arXiv 2402.02750) in its own float16: no epsilon, constant groups are 0/0; int32 words."""

    bits, dtypes = (2, 4, 8), (torch.float16,)

    def __init__(self, n_bits: int, axis: str, group_size: int):
        super().__init__(n_bits, axis, group_size)
        if group_size * n_bits % 32:
            raise NotImplementedError(f"{group_size} codes of {n_bits} bits fill no int32 words")

    def hold(self, x: Tensor) -> Held:
        groups, most, shape = axes.split(x, self.axis, self.group_size), 2**self.n_bits - 1, x.shape
        minimum = groups.amin(-1, keepdim=True)
        scale = (groups.amax(-1, keepdim=True) - minimum) / most
        codes = ((groups - minimum) / scale).clamp(0, most).round().to(torch.int32)
        kept = pack(codes & most, self.n_bits).view(torch.int32)  # NaN is any integer, later multiplied by scale 0
        return Held((kept, scale, minimum), shape, x.dtype, (kept, scale, minimum),
                    lambda: self.join(self._unpack(kept), shape), scale[..., 0])

    def dequantize(self, held: Held) -> Tensor:
        kept, scale, minimum = held.kept
        return self.join(self._unpack(kept).to(torch.float16) * scale + minimum, held.shape)

    def _unpack(self, kept: Tensor) -> Tensor:
        return unpack(kept.view(torch.uint8), self.n_bits, self.group_size)


class TransformersCache:
    """A QuantizedCache of transformers, asked for the policies that its arguments can say."""

    def __init__(self, backend: str, axis: str, axis_number: int, n_layers: int, rope: Rope, policy: CachePolicy):
        key, value, asked = policy.key, policy.value, policy.key.quantizer
        if policy.sinks or policy.pre_rope or policy.prefill != "exact" or key.flush_length or value.flush_length:
            raise NotImplementedError("it has no sinks, flush length, keys before RoPE or other prefill")
        if key != value or asked.symmetric or asked.axis != axis:
            raise NotImplementedError(f"it is judged with both sides alike, asymmetric, {axis}")
        if asked.block > 1 and not key.residual_length:
            raise NotImplementedError("without a residual length no token waits until its group is full")
        transformers = importlib.import_module("transformers")
        self.rope, config = rope, transformers.LlamaConfig(num_hidden_layers=n_layers)
        self.cache = transformers.QuantizedCache(backend, config, asked.n_bits, axis_number, axis_number,
                                                 asked.group_size, key.residual_length)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        first = self.cache.get_seq_length(layer)
        return self.cache.update(self.rope.apply(k, range(first, first + k.shape[-2])), v, layer)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """What `update` puts before the tokens of the next call."""
        one = self.cache.layers[layer]
        k, v = one._apply_pending_reorder(one._dequantize(one._quantized_keys), one._dequantize(one._quantized_values))
        return torch.cat([k, one.keys], dim=-2), torch.cat([v, one.values], dim=-2)

    def reorder(self, rows: list[int]) -> None:
        self.cache.reorder_cache(torch.as_tensor(rows))

    @property
    def length(self) -> int:
        return self.cache.get_seq_length(len(self.cache.layers) - 1)


# Each backend at the axis that is recommended for it, groups within a token, and at its other one: a group of quanto
# runs on from token to token, head to head and row to row; the i-th of HQQ's n groups is every n-th number from i on.
quanto_cache = partial(TransformersCache, "quanto", "per_token", 0)
quanto_cache_along_tokens = partial(TransformersCache, "quanto", "per_channel", -1)
hqq_cache = partial(TransformersCache, "hqq", "per_token", 1)
hqq_cache_along_tokens = partial(TransformersCache, "hqq", "per_channel", 0)

# Name (of a cache: backend and axis in transformers), kind, factory here, packages it needs.
ADAPTERS = (
    ("quanto", "quantizer", Quanto, ("optimum-quanto",)),
    ("HQQ", "quantizer", HQQ, ("hqq",)),
    ("torchao", "quantizer", TorchAO, ("torchao",)),
    ("KIVI", "quantizer", KIVI, ()),
    ("quanto 0", "cache", quanto_cache, ("transformers", "optimum-quanto")),
    ("quanto -1", "cache", quanto_cache_along_tokens, ("transformers", "optimum-quanto")),
    ("HQQ 1", "cache", hqq_cache, ("transformers", "hqq")),
    ("HQQ 0", "cache", hqq_cache_along_tokens, ("transformers", "hqq")),
)
