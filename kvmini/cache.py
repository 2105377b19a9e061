"""The cache: what attention remembers, exact or quantized.

`KVCache` and `QuantizedKVCache` are one cache with two kinds of store in it; the difference is to be read
in `store.py`. Keys and queries come unrotated: the cache owns positions and rotates. It does not decide
how numbers are stored (quantizers) or when (stores). Next file: `remat.py`, a cache that keeps something else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvmini.attention import View, attention
from kvmini.errors import KvminiError, count_of
from kvmini.kernels.decode import can_read, decode
from kvmini.kernels.source import Seen, Source
from kvmini.quantizers.base import Stored
from kvmini.rope import Rope
from kvmini.side import Side
from kvmini.store import PREFILLS, ExactStore, QuantizedStore, check_fits


@contextmanager
def all_or_nothing(stores: list[ExactStore | QuantizedStore]) -> Iterator[None]:
    """Whatever interrupts the block, Ctrl-C included, leaves the stores as they were before it."""
    marks = [store.mark() for store in stores]
    try:
        yield
    except BaseException:
        for store, mark in zip(stores, marks, strict=True):
            store.rewind(mark)
        raise


@dataclass(frozen=True)
class CachePolicy:
    """One side for keys, one for values, the first `sinks` tokens exact, keys stored before RoPE or after.

    `prefill` says what the queries of a call of more than one token see (`QuantizedStore.append`): "exact" as
    deployed, "streamed" as if tokens came one at a time, "all" as in the papers' ablation tables.

    Raises:
        KvminiError for a negative number of sinks or an unknown prefill mode.
    Example:
        >>> from kvmini import CachePolicy, Side, UniformQuantizer
        >>> keys = Side(UniformQuantizer(2, "per_channel", 32), residual_length=128)
        >>> values = Side(UniformQuantizer(2, "per_token", 32), residual_length=128)
        >>> CachePolicy(keys, values, sinks=4, pre_rope=True).prefill
        'exact'
    """

    key: Side
    value: Side
    sinks: int = 0
    pre_rope: bool = False
    prefill: str = "exact"

    def __post_init__(self):
        check_policy(self.sinks, self.prefill)

    @property
    def sides(self) -> dict[str, Side]:
        return {"key": self.key, "value": self.value}

    def new_cache(self, model) -> "QuantizedKVCache":
        """An empty cache of this policy for a `Llama`."""
        return QuantizedKVCache(model.config.n_layers, model.config.rope, self)


def check_policy(sinks: int, prefill: str) -> None:
    """What every policy demands of its sinks and its prefill mode."""
    count_of(sinks, "sinks", lowest=0)
    if prefill not in PREFILLS:
        raise KvminiError(f"prefill must be one of {', '.join(PREFILLS)}, not {prefill!r}")


class KVCache:
    """Every key (rotated) and value, exact.

    Shapes:
        q `[B, H, S, D]`, k and v `[B, Hkv, S, D]`, S new tokens a call; every layer takes the same calls.
    Raises:
        KvminiError for tensors that do not fit each other or what the cache holds, and for a crop or a
        batch row outside of it.
    Example:
        >>> cache = KVCache(n_layers=1, rope=Rope(head_dim=8))
        >>> q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
        >>> cache.attend(0, q, k, v).shape, cache.length, cache.nbytes
        (torch.Size([1, 4, 5, 8]), 5, 640)
    """

    pre_rope = False
    path = "torch"  # how a step reads what is packed, see kernels/decode.py; "readable": dequantized first

    def __init__(self, n_layers: int, rope: Rope):
        self.rope = rope
        self.keys = [ExactStore() for _ in range(n_layers)]
        self.values = [ExactStore() for _ in range(n_layers)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, layer_input: Tensor | None = None) -> Tensor:
        """The one door: append, attend, hand over. (`layer_input` is for a cache that keeps it instead of k and v.)"""
        first, S = self.stores_of(layer)[0].length, q.shape[-2]
        alike = q.ndim == k.ndim == 4 and (q[:, 0].shape, q.dtype) == (k[:, 0].shape, k.dtype)
        if not alike or q.shape[1] % k.shape[1]:
            raise KvminiError(f"queries {q.dtype} {list(q.shape)} do not fit keys {k.dtype} {list(k.shape)}: "
                              "[B, H, S, D] and [B, Hkv, S, D] with H a multiple of Hkv")
        rotated = self.rope.apply(q, range(first, first + S))
        keys, values = self.append(layer, k, v, layer_input)
        if self.path != "readable" and can_read(keys, values, S):
            return decode(rotated, keys, values, self.path)
        return attention(rotated, keys, values, first)

    def append(self, layer: int, k: Tensor, v: Tensor, layer_input: Tensor | None = None) -> tuple[Seen, Seen]:
        """Append tokens without attending; returns rotated keys and values as this call's queries see them.

        All or nothing: after an error the layer is as it was.
        """
        alike = k.ndim == 4 and k.shape == v.shape and k.dtype == v.dtype
        if not alike or not k.is_floating_point() or not k.numel():
            raise KvminiError("keys and values must be alike, floating point, [B, Hkv, S, D] with S >= 1, not "
                              f"{k.dtype} {list(k.shape)} and {v.dtype} {list(v.shape)}")
        stores, kept, seen = self.stores_of(layer), self._kept(layer, k, v, layer_input), []
        with all_or_nothing(stores):
            for side, store, x in zip(self.sides(), stores, kept, strict=True):
                try:
                    seen.append(store.append(x))
                except KvminiError as error:
                    raise KvminiError(f"layer {layer}, {side}: {error}") from None
            return self._seen(layer, *seen)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys (rotated) and values `[B, Hkv, length, D]` as attention sees them now."""
        stores = self.stores_of(layer)
        if not stores[0].length:
            raise KvminiError("nothing to read: the cache is empty")
        keys, values = self._seen(layer, *(View(store.read()) for store in stores))
        return keys.tokens, values.tokens

    def crop(self, n: int) -> None:
        """Keep the first n tokens only."""
        if not isinstance(n, int) or not 0 <= n <= self.length:
            raise KvminiError(f"cannot crop to {n} tokens: the cache holds {self.length}")
        for store in self.stores():
            if store.length:
                store.crop(n)

    def reorder(self, rows: Tensor | list[int]) -> None:
        """Replace batch row i by row rows[i] (beams)."""
        if not self.length:
            raise KvminiError("no rows to reorder: the cache is empty")
        rows, B = torch.as_tensor(rows), self.stores()[0].exact_tensors[0].shape[0]
        if rows.is_floating_point() or rows.ndim != 1 or not len(rows) or rows.min() < 0 or rows.max() >= B:
            raise KvminiError(f"rows must be a list of batch rows 0 .. {B - 1}, not {rows.tolist()}")
        for store in self.stores():
            store.reorder(rows.long())

    @property
    def length(self) -> int:
        """Tokens that every layer holds (within a call the first layers are ahead of the last)."""
        return self.stores()[-1].length

    @property
    def positions(self) -> range:
        """Positions of the live tokens."""
        return range(self.length)

    @property
    def nbytes(self) -> int:
        """Bytes in use: exact parts, and packed bodies with all their overheads."""
        return sum(x.nbytes for x in self._exact()) + sum(body.nbytes for body in self._bodies())

    @property
    def capacity_nbytes(self) -> int:
        """Bytes of all storage that the cache keeps alive."""
        parts = [part for body in self._bodies() for part in body.parts.values()]
        storages = {s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in (*self._exact(), *parts))}
        return sum(storages.values())

    @property
    def body_bits_per_element(self) -> float | None:
        """All bits of the packed bodies over the elements in them; None while they are empty."""
        elements = self._elements(self._bodies())
        return 8 * sum(body.nbytes for body in self._bodies()) / elements if elements else None

    @property
    def bits_per_element(self) -> float:
        """All bits, exact parts as they are held, over all live elements of K and V."""
        return 8 * self.nbytes / (self._elements(self.stores()) or 1)

    def bits_per_element_at(self, window_bits: int) -> float:
        """The same, were exact parts `window_bits` wide (papers count 16)."""
        bits = window_bits * sum(x.numel() for x in self._exact()) + 8 * sum(body.nbytes for body in self._bodies())
        return bits / (self._elements(self.stores()) or 1)

    def sides(self) -> dict[str, list[ExactStore | QuantizedStore]]:
        """What is kept, by name: a store in every layer."""
        return {"keys": self.keys, "values": self.values}

    def stores(self) -> list[ExactStore | QuantizedStore]:
        """Every layer's keys, then every layer's values."""
        return [store for stores in self.sides().values() for store in stores]

    def stores_of(self, layer: int) -> list[ExactStore | QuantizedStore]:
        """One layer's stores, one for each side."""
        return [stores[layer] for stores in self.sides().values()]

    def _kept(self, layer: int, k: Tensor, v: Tensor, layer_input: Tensor | None) -> tuple[Tensor, ...]:
        """What the layer's stores are given, one tensor for each side."""
        check_fits(self.values[layer], v)
        first = self.values[layer].length
        return k if self.pre_rope else self.rope.apply(k, range(first, first + k.shape[-2])), v

    def _seen(self, layer: int, keys: Seen, values: Seen) -> tuple[Seen, Seen]:
        """Rotated keys, and values, of what the layer's stores gave back."""
        if self.pre_rope and isinstance(keys, Source):
            return replace(keys, rope=self.rope), values
        return keys.map(lambda k: self.rope.apply(k, range(k.shape[-2]))) if self.pre_rope else keys, values

    def _exact(self) -> list[Tensor]:
        return [x for store in self.stores() for x in store.exact_tensors]

    def _bodies(self) -> list[Stored]:
        return [store.body for store in self.stores() if store.body is not None]

    def _elements(self, parts: list[ExactStore | QuantizedStore] | list[Stored]) -> int:
        """Elements of K and V that are held in these."""
        return sum(part.n_elements for part in parts)


class QuantizedKVCache(KVCache):
    """The same cache with its sides quantized as a policy says: sinks | packed body | recent window.

    Nothing keeps a float copy of what was handed over; what is stored never depends on how calls cut the sequence.

    Example:
        >>> from kvmini import UniformQuantizer
        >>> side = Side(UniformQuantizer(2, "per_token", 8))
        >>> cache = QuantizedKVCache(1, Rope(head_dim=8), CachePolicy(side, side))
        >>> _ = cache.append(0, *torch.randn(2, 1, 2, 5, 8))
        >>> cache.nbytes, cache.body_bits_per_element      # 2 bytes of codes, 4 of scale and minimum
        (120, 6.0)
    """

    def __init__(self, n_layers: int, rope: Rope, policy: CachePolicy):
        self.rope, self.pre_rope = rope, policy.pre_rope
        self.keys = [QuantizedStore(policy.key, n, policy.sinks, policy.prefill) for n in range(n_layers)]
        self.values = [QuantizedStore(policy.value, n, policy.sinks, policy.prefill) for n in range(n_layers)]
