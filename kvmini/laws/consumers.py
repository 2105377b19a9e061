"""Laws of where keys and values are used: errors of scores and outputs, and kernels that read packed codes.

A kernel under test is `kernel(q, keys, values)`: causal grouped-query attention of the last S tokens, already
rotated, over two `Source`s (`kernels/source.py`), whose keys may be stored before RoPE. Next file: `packers.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from kvmini.attention import View, attention
from kvmini.kernels.source import Source
from kvmini.laws.cases import Case, cases
from kvmini.laws.law import called, law, within
from kvmini.quantizers.uniform import UniformQuantizer
from kvmini.rope import Rope

REALISTIC = ("normal", "outlier channel", "sink token", "large mean", "ties", "constant")


@st.composite
def consumed(draw, offer, axis: str) -> tuple[Case, np.random.Generator, int]:
    seed, position = draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 2**20))
    return draw(cases(kinds=REALISTIC)(offer, axis)), np.random.default_rng(seed), position


@law("L18", "quantizer", consumed)
def values_are_off_by_the_weighted_half_steps(drawn) -> None:
    """The output of attention is off by at most the half steps of the values, averaged by the weights:
    |sum_t a_t (v_hat_td - v_td)| <= sum_t a_t scale_td / 2."""
    case, random, _ = drawn
    scores = torch.from_numpy(random.standard_normal((*case.x.shape[:2], 3, case.x.shape[-2])) * 5)
    v, v_hat, bound = case.x.double(), case.x_hat.double(), case.spread(case.bound)
    weights = scores.softmax(-1)
    _off_by(case, "output", weights @ v, weights @ v_hat, weights @ bound, weights @ (v.abs() + v_hat.abs()))


@law("L18", "quantizer", consumed)
def scores_are_off_by_the_half_steps_that_the_query_sees(drawn) -> None:
    """A score is off by at most sum_c |q_c| scale_c / 2 / sqrt(D)."""
    case, random, _ = drawn
    q = torch.from_numpy(random.standard_normal((*case.x.shape[:2], 3, case.x.shape[-1]))) / sqrt(case.x.shape[-1])
    k, k_hat, bound = case.x.double(), case.x_hat.double(), case.spread(case.bound)
    _off_by(case, "score", q @ k.mT, q @ k_hat.mT, q.abs() @ bound.mT, q.abs() @ (k.abs() + k_hat.abs()).mT)


@law("L18", "quantizer", consumed)
def rotated_scores_are_off_by_the_half_steps_of_pairs(drawn) -> None:
    """Stored before RoPE, a score is off by at most sum over pairs |(q_c, q_c')| |(scale_c, scale_c')| / 2 / sqrt(D),
    at any position."""
    case, random, first = drawn
    D = case.x.shape[-1] // 2 * 2
    if not D:
        return
    q = torch.from_numpy(random.standard_normal((*case.x.shape[:2], 3, D))) / sqrt(D)
    rope, positions = Rope(D), range(first, first + case.x.shape[-2])
    k, k_hat, bound = (x.double()[..., :D] for x in (case.x, case.x_hat, case.spread(case.bound)))

    def pairs(x: Tensor) -> Tensor:
        return torch.hypot(*x.chunk(2, dim=-1))
    _off_by(case, "score after RoPE", q @ rope.apply(k, positions).mT, q @ rope.apply(k_hat, positions).mT,
            pairs(q) @ pairs(bound).mT, pairs(q) @ (pairs(k) + pairs(k_hat)).mT)


def _off_by(case: Case, what: str, exact: Tensor, got: Tensor, bound: Tensor, magnitude: Tensor) -> None:
    # A float64 sum of n products is off by n + 1 half ulps of the sum of their magnitudes, rotation adds 4 of a pair's.
    rounding = 2.0**-53 * (max(case.x.shape[-2:]) + 8) * (magnitude + bound)
    within(str(case), f"(row, head, query, place) the {what}", got, exact, bound + rounding)


# --- kernels

def readable_kernel(q: Tensor, keys: Source, values: Source) -> Tensor:
    """The plain path: everything dequantized, then attention."""
    k, v = keys.read(), values.read()
    return attention(q, View(k), View(v), first=k.shape[-2] - q.shape[-2])


@dataclass(frozen=True, eq=False)
class Step:
    """One decode step: S rotated queries at the end of T tokens, most of them stored."""

    kernel: Callable[[Tensor, Source, Source], Tensor]
    q: Tensor
    keys: Source
    values: Source

    def __str__(self) -> str:
        key, value = (f"{s.parts[0]} exact, {s.parts[1]} {s.quantizer.axis} {s.quantizer.n_bits} bits"
                      f"{' symmetric' if s.quantizer.symmetric else ''}, {s.parts[2]} exact"
                      for s in (self.keys, self.values))
        rope = " before RoPE" if self.keys.rope else ""
        return f"{self.q.dtype} q {list(self.q.shape)}, keys{rope} {key}, values {value}"


@st.composite
def steps(draw, offer, variant: str) -> Step:
    """Every axis and width, ragged lengths, one token, nothing stored, everything stored, large numbers."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    B, Hkv, shared, D, T = (draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3)), 16,
                            draw(st.integers(1, 70)))
    dtype, large = draw(st.sampled_from([torch.float32, torch.float64])), draw(st.sampled_from([1.0, 30.0]))

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(random.standard_normal(shape)).to(dtype)

    def source(size: float) -> Source:
        quantizer = UniformQuantizer(draw(st.sampled_from([1, 2, 3, 4, 8])) if (even := draw(st.booleans())) else
                                     draw(st.sampled_from([2, 3, 4, 8])),
                                     draw(st.sampled_from(["per_token", "per_channel"])), 8, symmetric=not even)
        x = normal(B, Hkv, T, D) * size
        x[..., 3] *= 10
        sink = draw(st.integers(0, min(T, 3)))
        n = draw(st.integers(0, T - sink)) // quantizer.block * quantizer.block
        sink, body, window = x.split([sink, n, T - sink - n], dim=-2)
        return Source(quantizer, quantizer.quantize(body), sink, window, rope=rope)

    rope = draw(st.sampled_from([None, Rope(D)]))
    keys = source(large)
    rope = None
    values = source(1.0)
    return Step(offer.factory, normal(B, Hkv * shared, draw(st.integers(1, min(T, 3))), D), keys, values)


def exact_attention(q: Tensor, k: Tensor, v: Tensor, u: float) -> tuple[Tensor, Tensor]:
    """Causal attention of the last S tokens in float64, head by head: (output, how far any way to compute it may be
    off in a type whose ulp of 1 is u).

    Math:
        A score sums D products; a scale folded into the query makes terms of up to 3 |k|, and a key turned by RoPE in
        the same type is off by 3 u sqrt(2) |k|. So it is off by at most d = (D + 4) u 3 sum |q||k|, a weight then by
        e^(2d) - 1 + (T + 8) u of itself, the output by T u more.
    """
    q, k, v = q.double(), k.double(), v.double()
    (_, H, S, D), (Hkv, T) = q.shape, k.shape[1:3]
    k, v = (x.repeat_interleave(H // Hkv, dim=1) for x in (k, v))
    seen = torch.arange(T) <= T - S + torch.arange(S)[:, None]
    weights = (q @ k.mT / sqrt(D)).masked_fill(~seen, -torch.inf).softmax(-1)
    d = (D + 4) * u * 3 * (q.abs() @ k.abs().amax(-2, keepdim=True).mT / sqrt(D))
    relative = torch.expm1(2 * d) + (2 * T + 8) * u
    return weights @ v, relative * 3 * v.abs().amax(-2, keepdim=True)


@law("L16", "kernel", steps)
def fast_is_readable(step: Step) -> None:
    """A fast path gives what the readable path gives: attention over the dequantized tokens."""
    expected, bound = exact_attention(step.q, step.keys.read(), step.values.read(), torch.finfo(step.q.dtype).eps)
    given = [x.clone() for x in (step.q, step.keys.read(), step.values.read())]
    out = called(step, "the kernel", step.kernel, step.q, step.keys, step.values)
    within(step, "the output", out, expected, bound)
    for what, x, before in zip("qkv", (step.q, step.keys.read(), step.values.read()), given, strict=True):
        within(step, f"{what} after the call", x, before)
