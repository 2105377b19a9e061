"""Laws of rotary embeddings. A RoPE under test is `factory(head_dim, base)`, with `apply(x, positions)` and
`undo(x, positions)`, positions a range. Next file: `caches.py`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from kvmini.laws.law import called, law, within

FAR = 2**20
U = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}  # half an ulp of 1


@dataclass(frozen=True, eq=False)
class Turn:
    """Two tensors `[1, 2, S, D]` and where they stand."""

    rope: Any
    base: float
    x: Tensor
    y: Tensor
    first: int

    def __str__(self) -> str:
        return f"{self.x.dtype} {list(self.x.shape)}, base {self.base:g}, positions from {self.first}"

    def apply(self, x: Tensor, first: int) -> Tensor:
        return called(self, "apply", self.rope.apply, x, range(first, first + x.shape[-2]))

    @property
    def pair_norm(self) -> Tensor:
        """|(x_c, x_c')| of each element's pair."""
        a, b = self.x.double().chunk(2, dim=-1)
        return torch.hypot(a, b).repeat(1, 1, 1, 2)

    def angle_error(self, first: int) -> float:
        """What a rotation may be off by, relative to the pair: its angle and ours in float64 (position * theta is off
        by half an ulp, theta by one for the power and a third for its exponent), and cos, sin, products and sum."""
        return 8 * (first + self.x.shape[-2]) * 2.0**-53 + 4 * U[self.x.dtype]


@st.composite
def turns(draw, offer, variant: str) -> Turn:
    D, base = draw(st.sampled_from([2, 8, 64, 80])), draw(st.sampled_from([10000.0, 500000.0, 100.0]))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    x, y = torch.randn(2, 1, 2, draw(st.integers(1, 5)), D, generator=random, dtype=torch.float64).to(dtype)
    first = draw(st.integers(0, 10) | st.integers(0, FAR))
    return Turn(offer.factory(head_dim=D, base=base), base, x, y, first)


@law("L17", "rope", turns)
def rotation(turn: Turn) -> None:
    """RoPE is the rotation of the pairs (c, c + D/2) by position * base^(-2c/D), at any position up to 2^20."""
    D = turn.x.shape[-1]
    angle = torch.arange(turn.first, turn.first + turn.x.shape[-2]).double()[:, None] * (
        turn.base ** (-2 * torch.arange(D // 2).double() / D))
    pairs = torch.complex(*turn.x.double().chunk(2, dim=-1)) * torch.polar(torch.ones_like(angle), angle)
    within(turn, "the rotated x", turn.apply(turn.x, turn.first), torch.cat([pairs.real, pairs.imag], -1),
           turn.pair_norm * turn.angle_error(turn.first))


@law("L17", "rope", turns)
def norms_are_kept(turn: Turn) -> None:
    """A rotation keeps the norm of every token."""
    norm = turn.x.double().norm(dim=-1)
    within(turn, "the norm", turn.apply(turn.x, turn.first).double().norm(dim=-1), norm, norm * 8 * U[turn.x.dtype])


@law("L17", "rope", turns, needs=("undo",))
def undo_is_the_inverse(turn: Turn) -> None:
    """`undo` turns back what `apply` turned."""
    turned = turn.apply(turn.x, turn.first)
    back = called(turn, "undo", turn.rope.undo, turned, range(turn.first, turn.first + turn.x.shape[-2]))
    within(turn, "x turned and turned back", back, turn.x, turn.pair_norm * 12 * U[turn.x.dtype])


@law("L17", "rope", turns)
def scores_depend_on_distance(turn: Turn) -> None:
    """The score of a query and a key depends on their distance only: shifting both changes nothing."""
    def scores(first: int) -> Tensor:
        q, k = (turn.apply(t, first).double() for t in (turn.x, turn.y))
        return q @ k.mT
    norms = turn.x.double().norm(dim=-1)[..., :, None] * turn.y.double().norm(dim=-1)[..., None, :]
    within(turn, f"the score, shifted by {turn.first}, (.., query, key)", scores(turn.first), scores(0),
           norms * 4 * turn.angle_error(turn.first))


@law("L17", "rope", turns)
def interleaved_agrees(turn: Turn) -> None:
    """Half-split RoPE of permuted channels is interleaved RoPE: pairs (2c, 2c + 1), as in GGUF files."""
    D = turn.x.shape[-1]
    order = torch.arange(D).view(2, -1).T.flatten()  # interleaved channel i is half-split channel order[i]
    angle = turn.first * turn.base ** (-2 * torch.arange(D // 2).double() / D)
    first = turn.x[..., :1, order].double().unflatten(-1, (-1, 2))
    a, b = first[..., 0], first[..., 1]
    turned = torch.stack([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).flatten(-2)
    within(turn, "the rotated x, interleaved,", turn.apply(turn.x[..., :1, :], turn.first)[..., order], turned,
           turn.pair_norm[..., :1, order] * turn.angle_error(turn.first))
