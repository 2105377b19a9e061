"""How one side (keys or values) is kept: a quantizer, and when it is given what.

Next file: `kernels/source.py`, what can be read of it; it happens in `store.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvmini.errors import KvminiError, count_of
from kvmini.quantizers.base import Quantizer


@dataclass(frozen=True)
class Side:
    """How keys, or values, are kept: the quantizer, and when it is called.

    `residual_length` (R) recent tokens stay exact; what is older is handed over `flush_length` (F) tokens
    at a time, by default one block of the quantizer (1 token per_token, G tokens per_channel). So a
    per_token side keeps R recent tokens, a per_channel side R .. R + G - 1.
    A callable `quantizer` is given the layer's index and returns that layer's quantizer.

    Raises:
        KvminiError if R or F is not a whole number, F is no multiple of the block, or the quantizer has no block.
    Example:
        >>> from kvmini import Side, UniformQuantizer
        >>> side = Side(UniformQuantizer(2, "per_channel", 32), residual_length=128)
        >>> side.flush_of(side.quantizer_of(layer=0))
        32
    """

    quantizer: Quantizer | Callable[[int], Quantizer]
    residual_length: int = 0
    flush_length: int | None = None

    def __post_init__(self):
        count_of(self.residual_length, "residual_length", lowest=0)
        if self.flush_length is not None:
            count_of(self.flush_length, "flush_length")
        if isinstance(self.quantizer, Quantizer) or not callable(self.quantizer):
            self.flush_of(self.quantizer_of(0))

    def quantizer_of(self, layer: int) -> Quantizer:
        by_layer = callable(self.quantizer) and not isinstance(self.quantizer, Quantizer)
        quantizer = self.quantizer(layer) if by_layer else self.quantizer
        if not isinstance(quantizer, Quantizer):
            raise KvminiError(f"a side needs a kvmini Quantizer (subclass it), not {type(quantizer).__name__}")
        return quantizer

    def flush_of(self, quantizer: Quantizer) -> int:
        block = quantizer.block
        if block is None:
            raise KvminiError("a cache cannot use a quantizer with block None (per_tensor): its scale would depend on "
                              "how the sequence was cut into calls; use per_token or per_channel")
        flush = self.flush_length or block
        if flush % block:
            raise KvminiError(f"flush_length {flush} is not a multiple of the quantizer's block of {block} tokens")
        return flush
