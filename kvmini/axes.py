"""Axes: which elements of a tensor share one scale.

This file is the question of the whole project. A tensor `[..., T, D]` (T tokens, D channels) is cut
into groups; each group gets one scale. `per_token` cuts a token into runs of G channels,
`per_channel` cuts a channel into runs of G tokens, `per_tensor` does not cut at all.

It knows nothing of bits or rounding: that is `quantizers/uniform.py`. Groups are never padded, so a
length that G does not divide is an error. Next file: `packing.py`.
"""

from torch import Tensor

from kvmini.errors import KvminiError, count_of

AXES = ("per_token", "per_channel", "per_tensor")


def check(axis: str, group_size: int) -> None:
    """Raise KvminiError unless `axis` is one of AXES and `group_size` a whole number, 1 or more."""
    if axis not in AXES:
        raise KvminiError(f"axis must be one of {', '.join(AXES)}, not {axis!r}")
    count_of(group_size, "group_size")


def block(axis: str, group_size: int) -> int | None:
    """How many tokens must come together: 1, G, or None where only the whole tensor will do."""
    return {"per_token": 1, "per_channel": group_size, "per_tensor": None}[axis]


def split(x: Tensor, axis: str, group_size: int) -> Tensor:
    """Cut `x` into groups, which become its last dimension.

    Shapes:
        x `[..., T, D]` -> per_token `[..., T, D/G, G]`; per_channel `[..., T/G, D, G]`;
        per_tensor `[B, 1, everything else]` (B is the first dimension, where x has at least three).
    Raises:
        KvminiError if G does not divide D (per_token) or T (per_channel).
    Example:
        >>> import torch
        >>> x = torch.arange(8).view(4, 2)          # four tokens of two channels
        >>> split(x, "per_channel", 4).tolist()     # one group per channel
        [[[0, 2, 4, 6], [1, 3, 5, 7]]]
    """
    T, D = x.shape[-2:]
    if axis == "per_token":
        _divides(D, group_size, "channels (head_dim)", axis)
        return x.unflatten(-1, (D // group_size, group_size))
    if axis == "per_channel":
        _divides(T, group_size, "tokens", axis)
        return x.unflatten(-2, (T // group_size, group_size)).movedim(-2, -1)
    row = x.shape[1:] if x.ndim > 2 else x.shape  # what one batch row holds
    return x.reshape(*x.shape[:x.ndim - len(row)], 1 if T else 0, max(1, row.numel()))


def join(groups: Tensor, axis: str, shape: tuple[int, ...]) -> Tensor:
    """Put groups back: the inverse of `split` for a tensor of `shape`.

    Example:
        >>> import torch
        >>> x = torch.randn(2, 3, 8, 16)
        >>> all(torch.equal(join(split(x, axis, 4), axis, x.shape), x) for axis in AXES)
        True
    """
    if axis == "per_channel":
        groups = groups.movedim(-1, -2)
    return groups.reshape(shape)


def _divides(n: int, group_size: int, what: str, axis: str) -> None:
    if n % group_size:
        raise KvminiError(f"{n} {what} cannot be cut into {axis} groups of group_size {group_size}: "
                          f"{n} is not a multiple of {group_size}")
