"""RoPE: the position of a token as a rotation of its channel pairs, written out.

Channel c is paired with channel c + D/2 (the half-split order of Hugging Face, not the interleaved
order (2c, 2c + 1) of the RoFormer paper and of GGUF files). The pair is turned by
`position * base^(-2c/D)`: fast for the first pairs, hardly at all for the last ones. A score q.k then
depends on the distance of the two tokens only.

Keys can be stored before or after the rotation; which one is the cache's choice. Next: `attention.py`.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvmini.errors import KvminiError

TABLE = 1024  # positions for which cos and sin are made at once, in a long sequence


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of `head_dim` channels.

    Shapes:
        x `[..., S, D]`, one position per token: a range, or an integer tensor `[S]`.
    Math:
        theta_c = base^(-2c/D) / factors[c], angle = position * theta_c (float64; cos and sin cast once),
        (x_c, x_{c+D/2}) -> (x_c cos - x_{c+D/2} sin, x_{c+D/2} cos + x_c sin), c = 0 .. D/2 - 1.
    Raises:
        KvminiError if head_dim is odd, or if positions and tokens differ in number.
    Source:
        RoFormer (arXiv 2104.09864), section 3.4; pairs as in transformers' Llama.
    Example:
        >>> rope = Rope(head_dim=2, base=10000.0)
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> rope.apply(x, range(2)).round(decimals=2).tolist()      # cos 1 = 0.54, sin 1 = 0.84
        [[1.0, 0.0], [0.5400000214576721, 0.8399999737739563]]
    """

    head_dim: int
    base: float = 10000.0
    factors: tuple[float, ...] | None = None  # long-context scaling: one divisor per pair (see llama3_factors)

    def __post_init__(self):
        if self.head_dim < 2 or self.head_dim % 2:
            raise KvminiError(f"head_dim must be even for RoPE to pair its channels, not {self.head_dim}")
        if self.factors is not None and len(self.factors) != self.head_dim // 2:
            raise KvminiError(f"RoPE needs {self.head_dim // 2} factors, one per pair, not {len(self.factors)}")

    def apply(self, x: Tensor, positions: range | Tensor) -> Tensor:
        """Rotate each token to its position."""
        self._check(x, positions)
        return self.turn(x, *self.cos_sin(positions, x))

    def undo(self, x: Tensor, positions: range | Tensor) -> Tensor:
        """Rotate each token back: the inverse of `apply`, up to rounding."""
        self._check(x, positions)
        cos, sin = self.cos_sin(positions, x)
        return self.turn(x, cos, -sin)

    def cos_sin(self, positions: range | Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Of the angles of each position, `[S, D/2]` each, in the dtype and on the device of `like`."""
        if not isinstance(positions, range):
            return _cos_sin_of(self, positions.double(), like.dtype, like.device)
        if len(positions) < TABLE:
            return _cos_sin_of_range(self, positions, like.dtype, like.device)
        first = positions.start // TABLE * TABLE  # a longer table serves the next steps, too
        table = range(first, -(-positions.stop // TABLE) * TABLE)
        rows = slice(positions.start - first, positions.stop - first)
        cos, sin = _cos_sin_of_range(self, table, like.dtype, like.device)
        return cos[rows], sin[rows]

    @staticmethod
    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Each pair of channels by its angle."""
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _check(self, x: Tensor, positions: range | Tensor) -> None:
        if x.shape[-1] != self.head_dim or x.shape[-2] != len(positions):
            raise KvminiError(f"RoPE for head_dim {self.head_dim} got a tensor {list(x.shape)} and {len(positions)} "
                              "positions: it needs [..., S, D] and one position per token")


def _cos_sin_of(rope: Rope, positions: Tensor, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    theta = rope.base ** (-torch.arange(0, rope.head_dim, 2, dtype=torch.float64) / rope.head_dim)
    if rope.factors is not None:
        theta = theta / torch.tensor(rope.factors, dtype=torch.float64)
    angle = positions.cpu()[:, None] * theta
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


@lru_cache(maxsize=4)  # all layers of one call ask for the same positions
def _cos_sin_of_range(rope: Rope, positions: range, dtype: torch.dtype,
                      device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # the table outlives the call, and a later one may want gradients
        return _cos_sin_of(rope, torch.tensor(positions, dtype=torch.float64), dtype, device)


def llama3_factors(head_dim: int, base: float, factor: float, low_freq_factor: float, high_freq_factor: float,
                   original_context: int) -> tuple[float, ...]:
    """The divisors of Llama 3.1's context extension: slow pairs are slowed by `factor`, fast ones kept.

    Math:
        wavelength w_c = 2 pi base^(2c/D); 1 where w < original/high, `factor` where w > original/low, and
        between them 1 / ((1 - s)/factor + s) with s = (original/w - low) / (high - low).
    Source:
        Llama 3.1 reference code; `rope_type: llama3` in transformers.
    Example:
        >>> f = llama3_factors(128, 500000.0, 8.0, 1.0, 4.0, 8192)
        >>> f[0], f[-1]
        (1.0, 8.0)
    """
    factors = []
    for c in range(head_dim // 2):
        wavelength = 2 * math.pi * base ** (2 * c / head_dim)
        smooth = (original_context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
        smooth = min(1.0, max(0.0, smooth))
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return tuple(factors)
