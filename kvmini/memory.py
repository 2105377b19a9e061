"""Why the KV cache hurts, in bytes: what a cache takes, what fits beside the weights, how fast a step can be.

What a policy stores follows from one block that its quantizer really quantizes. Only weights and cache are
counted (a program needs activations and copies too, and rematerialisation pays in work), and every token stays (no
sliding window). GB is 10^9 bytes, GiB 2^30. Next file: `experiments/run.py`.
"""

from bisect import bisect_right
from collections import Counter
from math import lcm

import torch

from kvmini.errors import KvminiError, count_of
from kvmini.policies import Policy
from kvmini.shapes import Shape

GIB = 2**30
BANDWIDTH = 2.039e12  # bytes a second of an A100-80GB; no ratio depends on it
WIDTHS = {16: torch.float16, 32: torch.float32, 64: torch.float64}  # of windows: bits -> what a quantizer is given


class Footprint:
    """Bytes of one sequence's cache by its length, windows and sinks `window_bits` wide.

    Math:
        of n tokens a side has handed over b = floor(max(0, n - sinks - R) / F) * F (`store.py`), or 0 where that is
        less than the quantizer's warm-up; bytes = b / F * bytes of F more tokens + what is stored once (factors, say)
        + (n - b) * bytes of an exact token.
    Example:
        >>> from kvmini.policies import get
        >>> from kvmini.shapes import SHAPES
        >>> kivi = Footprint(SHAPES["LLaMA-7B"], get("kivi-2"))
        >>> kivi.nbytes(511), kivi.nbytes(512)     # the keys of 128 tokens leave together
        (104546304, 77594624)
    """

    def __init__(self, shape: Shape, policy: Policy | None, window_bits: float = 16):
        if window_bits not in WIDTHS if policy else not 0 < window_bits <= 64:
            raise KvminiError(f"window_bits must be 16, 32 or 64 (without a policy, up to 64), not {window_bits!r}")
        self.sinks, self.exact = policy.sinks if policy else 0, 0 if policy else shape.token_nbytes(window_bits)
        self.saved = Counter()  # (R, F, tokens of the first hand-over, bytes saved by F tokens, bytes once) -> layers
        for name, side in policy.sides.items() if policy else ():
            heads, channels = (1, shape.hidden) if name == "layer_input" else (shape.n_kv_heads, shape.head_dim)
            self.exact += shape.n_layers * heads * channels * window_bits // 8
            last = None
            for layer in range(shape.n_layers):
                quantizer = side.quantizer_of(layer)
                if quantizer is not last:
                    last, flush = quantizer, side.flush_of(quantizer)
                    first = -(-max(1, quantizer.warm_up) // flush) * flush
                    x = torch.randn(1, heads, first + flush, channels, generator=torch.Generator().manual_seed(0))
                    more, start = x.to(WIDTHS[window_bits]).split([flush, first], dim=-2)
                    body = quantizer.quantize(start)
                    step = quantizer.extend(body, more).nbytes - body.nbytes
                    once = body.nbytes - first // flush * step
                self.saved[side.residual_length, flush, first, more.nbytes - step, once] += 1
        self.period = lcm(*(flush for _, flush, *_ in self.saved))

    def nbytes(self, n: int) -> int:
        """Bytes at n tokens."""
        total = n * self.exact
        for (residual, flush, first, saved, once), layers in self.saved.items():
            handed = max(0, n - self.sinks - residual) // flush * flush
            if handed >= first:
                total -= layers * (handed // flush * saved - once)
        return total

    def peak(self, n: int) -> int:
        """The most bytes on the way to n tokens: a hand-over shrinks the cache, a period of them does not."""
        ends = {n, *(min(n, self.sinks + residual + first - 1) for residual, _, first, *_ in self.saved)}
        return max(self.nbytes(m) for end in ends for m in range(max(0, end + 1 - self.period), end + 1))


def cache_nbytes(shape: Shape, policy: Policy | None, n_tokens: int, batch: int = 1, window_bits: float = 16) -> int:
    """Bytes of a cache that holds n tokens of `batch` sequences; without a policy, all `window_bits` wide."""
    return Footprint(shape, policy, window_bits).nbytes(count_of(n_tokens, "n_tokens", 0)) * count_of(batch, "batch")


def largest_batch(shape: Shape, policy: Policy | None, budget_bytes: int, n_tokens: int, weight_bits: float = 16,
                  window_bits: float = 16) -> int:
    """The most sequences that fit beside the weights and can all grow to n tokens; an error if the weights do not."""
    room = _room(shape, budget_bytes, weight_bits)
    return room // Footprint(shape, policy, window_bits).peak(count_of(n_tokens, "n_tokens"))


def longest_context(shape: Shape, policy: Policy | None, budget_bytes: int, batch: int = 1,
                    weight_bits: float = 16, window_bits: float = 16) -> int:
    """The length to which `batch` sequences can grow token by token; an error if the weights do not fit."""
    room, footprint = _room(shape, budget_bytes, weight_bits), Footprint(shape, policy, window_bits)
    high = count_of(batch, "batch")
    while footprint.peak(high) * batch <= room and high < 2**60:
        high *= 2
    return bisect_right(range(high), room, key=lambda n: footprint.peak(n) * batch) - 1


def _room(shape: Shape, budget: int, weight_bits: float) -> int:
    if (weights := shape.weight_nbytes(weight_bits)) > budget:
        raise KvminiError(f"the weights of {shape.name} alone take {weights / GIB:.1f} GiB at {weight_bits:g} bits: "
                          f"give more than {budget / GIB:.1f} GiB, or fewer bits")
    return int(budget) - weights


def tokens_per_second(shape: Shape, policy: Policy | None, lengths: range, batch: int = 1,
                      bandwidth: float = BANDWIDTH, weight_bits: float = 16) -> float:
    """The most that decode steps at these cache lengths can give: weights and all of the cache are read once a step."""
    footprint = Footprint(shape, policy)
    read = len(lengths) * shape.weight_nbytes(weight_bits, read=True) + batch * sum(map(footprint.nbytes, lengths))
    return len(lengths) * batch * bandwidth / read


def decode_step_seconds(shape: Shape, policy: Policy | None, n_tokens: int, batch: int = 1,
                        bandwidth: float = BANDWIDTH, weight_bits: float = 16) -> float:
    """The least that one decode step over n cached tokens takes: bytes to read over bytes a second."""
    return batch / tokens_per_second(shape, policy, range(n_tokens, n_tokens + 1), batch, bandwidth, weight_bits)


def gain_ceiling(shape: Shape, policy: Policy | None, lengths: range, batch: int, own: int,
                 weight_bits: float = 16) -> float:
    """The most that a policy at batch `own` gains over the exact cache at `batch`, both reading at full bandwidth."""
    ours, exact = (tokens_per_second(shape, chosen, lengths, size, weight_bits=weight_bits)
                   for chosen, size in ((policy, own), (None, batch)))
    return ours / exact
