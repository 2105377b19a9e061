"""Which arrays an object keeps alive, found by walking it: what `nbytes` has to agree with.

It walks what a class holds in attributes, slots, dictionaries and sequences; not closures, not globals.
Next file: `blocks.py`.
"""

from contextlib import suppress
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor


def storages(thing: Any) -> dict[int, int]:
    """The memory blocks behind all arrays reachable from an object: address -> bytes.

    Example:
        >>> import torch
        >>> view = torch.zeros(100)[:3]                   # three numbers that keep a hundred alive
        >>> sum(storages({"a": view, "b": view}).values())
        400
    """
    found: dict[int, int] = {}
    seen: set[int] = set()
    waiting = [thing]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type | str | bytes | ModuleType):
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            with suppress(RuntimeError, NotImplementedError):  # a wrapper has no storage, only the tensors it wraps
                storage = one.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(one, np.ndarray):
            while isinstance(one.base, np.ndarray):
                one = one.base
            found[one.ctypes.data] = one.nbytes
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple | set | frozenset):
            waiting += one
        if not isinstance(one, np.ndarray):
            slots = [slot for base in type(one).__mro__ for slot in getattr(base, "__slots__", ())]
            waiting += [*getattr(one, "__dict__", {}).values(), *(getattr(one, slot, None) for slot in slots)]
    return found


def reachable_nbytes(thing: Any, but_not: Any = None) -> int:
    """Bytes of all arrays reachable from `thing`, less those reachable from `but_not`."""
    shared = storages(but_not)
    return sum(n for address, n in storages(thing).items() if address not in shared)
