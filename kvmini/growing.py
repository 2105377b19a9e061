"""Growing in place: what is appended to along its tokens keeps room behind it, and moves only when that is full.

A step of decoding adds one token to thousands. `torch.cat` would copy the thousands; here the new token is written
behind them, and the tensor that is handed out is a longer view of the same storage. Nothing that was handed out
ever changes: an older view ends before what was written, and whoever appends to an older view gets a copy.
Next file: `quantizers/base.py`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LEAST, SHARE = 8, 4  # room behind n tokens when they must move: 8, or n / 4


@dataclass(eq=False)
class Room:
    """The storage behind a view: `[..., capacity, m]`, of which `filled` tokens are written. None: no room yet."""

    buffer: Tensor | None = None
    filled: int = 0


def growable(x: Tensor) -> Tensor:
    """x itself, from now on with room behind it once it is appended to."""
    if not hasattr(x, "room"):
        x.room = Room()  # a note on this one tensor object; its slices and copies do not inherit it
    return x


def append(a: Tensor, b: Tensor) -> Tensor:
    """`torch.cat([a, b], dim=-2)`; where `a` is growable, without copying it each time, and growable again.

    Example:
        >>> a = append(growable(torch.zeros(1, 5, 2)), torch.ones(1, 1, 2))      # moves, and has room for 8 more
        >>> b = append(a, torch.ones(1, 1, 2))
        >>> b.data_ptr() == a.data_ptr(), a.shape[-2], b.shape[-2]
        (True, 6, 7)
    """
    room: Room | None = getattr(a, "room", None)
    if room is None or a.requires_grad or b.requires_grad:  # a graph must find its tensors as they were
        return torch.cat([a, b], dim=-2)
    n, total = a.shape[-2], a.shape[-2] + b.shape[-2]
    if room.buffer is None or room.filled > n or room.buffer.shape[-2] < total:
        with torch.inference_mode(False):  # the buffer outlives the call, and may be written outside of that mode
            buffer = a.new_empty(*a.shape[:-2], total + max(LEAST, n // SHARE), a.shape[-1])
        buffer[..., :n, :] = a
        room = Room(buffer, n)
    room.buffer[..., n:total, :] = b
    room.filled = total
    view = room.buffer[..., :total, :]
    view.room = room
    return view
