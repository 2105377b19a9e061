"""What is under test, and what it offers: found out by asking, before any law is judged.

A quantizer's factory is asked for every axis, 1 to 8 bits and three group sizes; what it answers with
NotImplementedError (or ValueError) is not offered. Of what it returns we see whether it takes torch or numpy arrays,
which types, and what it shows (codes, scale, ...). Next file: `grids.py`, the first laws.
"""

from collections.abc import Callable, Iterable
from itertools import product

import numpy as np
import torch

from kvmini import axes
from kvmini.cache import CachePolicy
from kvmini.errors import KvminiError
from kvmini.laws.cases import Case
from kvmini.laws.law import Law, numbers
from kvmini.quantizers.base import FLOATS
from kvmini.quantizers.uniform import UniformQuantizer
from kvmini.rope import Rope
from kvmini.side import Side

GROUPS = (8, 32, 5)
LAYERS = 2
FACE = ("attend", "append", "read", "crop", "reorder", "length", "nbytes", "capacity_nbytes")
CALLABLE = ("__call__",)
METHODS = {"quantizer": CALLABLE, "cache": CALLABLE, "kernel": CALLABLE, "rope": CALLABLE,
           "packer": ("pack", "unpack", "packed_size")}  # what the thing named must have


class Offer:
    """An implementation under test. `QuantizerOffer` and `CacheOffer` find out more about theirs."""

    variants: tuple[str, ...] = ("",)
    shows: frozenset[str] | set[str] = frozenset()

    def __init__(self, kind: str, name: str, factory: Callable):
        if missing := [method for method in METHODS[kind] if not hasattr(factory, method)]:
            raise KvminiError(f"{name} is no {kind}: it has no {' and no '.join(missing)}")
        self.kind, self.name, self.factory = kind, name, factory
        self.refused: dict[str, str] = {}
        self.does_not_promise: dict[str, str] = {}
        self._does_not_promise(factory)

    def _does_not_promise(self, holder) -> None:
        said = getattr(holder, "does_not_promise", {})
        if not isinstance(said, dict):
            raise KvminiError(f"{self.name}: does_not_promise must be a dict, law number to reason, not {said!r}")
        if unknown := set(said) - set(numbers()):
            raise KvminiError(f"{self.name} does not promise {', '.join(sorted(map(str, unknown)))}, which are no laws")
        self.does_not_promise |= said

    def variants_of(self, law: Law) -> tuple[str, ...]:
        """The axes on which this law is judged here; one that is not offered where all are not."""
        if law.variants is None:
            return self.variants
        return tuple(variant for variant in self.variants if variant in law.variants) or law.variants[:1]

    def lacks(self, law: Law, variant: str) -> str | None:
        """Why this law is not judged here; None where it is."""
        if law.number in self.does_not_promise:
            return f"not promised: {self.does_not_promise[law.number]}"
        if variant not in self.variants:
            return f"does not offer {variant}"
        if missing := [need for need in law.needs if need not in self.shows]:
            return f"needs {', '.join(missing)}"
        return None

    def describe(self) -> str:
        """What it offers, in half a line."""
        return ""

    def header(self) -> list[str]:
        """What a report says first: what is under test, what it offers, what it does not."""
        return [f"{self.kind} under test: {self.name}", *filter(None, [f"  {self.describe()}".rstrip()]),
                *(f"  does not offer {what}: {reason}" for what, reason in self.refused.items()),
                *(f"  does not promise {number}: {reason}" for number, reason in sorted(self.does_not_promise.items()))]


class QuantizerOffer(Offer):
    """Somebody's `factory(n_bits, axis, group_size)`."""

    def __init__(self, name: str, factory: Callable):
        super().__init__("quantizer", name, factory)
        self.is_numpy, self.scale_dtype = False, None  # None: hidden, or it follows the type of the input
        self.configs = {axis: [(n_bits, group_size) for n_bits in range(1, 9) for group_size in GROUPS
                               if self._offers(n_bits, axis, group_size)] for axis in axes.AXES}
        self.variants = tuple(axis for axis, configs in self.configs.items() if configs)
        if not self.variants:
            raise KvminiError(f"{name} offers no axis, bits and group size: {next(iter(self.refused.values()))}")
        self._ask_for_arrays()
        self._ask_what_it_shows()

    def describe(self) -> str:
        axes = (f"{axis} ({_list(n for n, _ in configs)} bits, groups of {_list(g for _, g in configs)})"
                for axis, configs in self.configs.items() if configs)
        dtypes = _list(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        shown = _list(self.shows - set(self.variants) - {"asymmetric"}) or "nothing of what it stores"
        return f"offers {'; '.join(axes)}; {'numpy' if self.is_numpy else 'torch'} {dtypes}; shows {shown}"

    def _offers(self, n_bits: int, axis: str, group_size: int) -> bool:
        settings = f"n_bits={n_bits}, axis={axis!r}, group_size={group_size}"
        try:
            quantizer = self.factory(n_bits=n_bits, axis=axis, group_size=group_size)
        except (NotImplementedError, ValueError) as reason:
            self.refused.setdefault(axis, f"{settings}: {_line(reason)}")
            return False
        except Exception as error:
            raise KvminiError(f"{self.name}({settings}) raised {type(error).__name__}: {_line(error)} "
                              "(NotImplementedError is how to say that it is not offered)") from None
        if not hasattr(quantizer, "quantize") or not hasattr(quantizer, "dequantize"):
            raise KvminiError(f"{self.name}({settings}) is a {type(quantizer).__name__} without quantize or dequantize")
        return True

    def _probe(self, dtype: torch.dtype) -> Case:
        axis = self.variants[0]
        n_bits, group_size = self.configs[axis][-1]
        x = torch.linspace(-1, 2, 2 * group_size**2).view(1, 2, group_size, group_size)
        return Case(self, n_bits, axis, group_size, x.to(dtype))

    def _ask_for_arrays(self) -> None:
        """Torch if it takes a torch tensor and gives one back, else numpy; then which types."""
        reasons = []
        for self.is_numpy in (False, True):
            self.dtypes = []
            for dtype in FLOATS:
                if self.is_numpy and dtype == torch.bfloat16:
                    continue
                case = self._probe(dtype)
                try:
                    got = case.quantizer.dequantize(case.quantizer.quantize(case.given(case.x)))
                except Exception as error:
                    self.refused[str(dtype)] = f"{type(error).__name__}: {_line(error)}"
                    reasons.append(f"{dtype}: {self.refused[str(dtype)]}")
                    continue
                if isinstance(got, np.ndarray if self.is_numpy else torch.Tensor):
                    self.dtypes.append(dtype)
                    self.refused.pop(str(dtype), None)
            if self.dtypes:
                return
        raise KvminiError(f"{self.name} gives back neither torch nor numpy arrays; {'; '.join(reasons[:1])}")

    def _ask_what_it_shows(self) -> None:
        case = self._probe(torch.float32 if torch.float32 in self.dtypes else self.dtypes[0])
        stored, quantizer = case.stored, case.quantizer
        shown = {name for name in ("codes", "scale", "minimum", "nbytes") if getattr(stored, name, None) is not None}
        self._does_not_promise(quantizer)
        symmetric = getattr(quantizer, "symmetric", getattr(stored, "minimum", 0) is None)
        able = {name for name in ("cat", "take", "block") if getattr(quantizer, name, None) is not None}
        if hasattr(quantizer, "affine") and quantizer.affine(stored) is not None:
            able.add("affine")
        self.shows = shown | able | set(self.variants) | (set() if symmetric else {"asymmetric"})
        scales = {case.tensor("scale", case.stored.scale).dtype for case in map(self._probe, self.dtypes)
                  } if "scale" in shown else set()
        declared = getattr(quantizer, "scale_dtype", None)
        self.scale_dtype = declared if isinstance(declared, torch.dtype) else scales.pop() if len(scales) == 1 else None

class RopeOffer(Offer):
    """Somebody's `factory(head_dim, base)`."""

    def __init__(self, name: str, factory: Callable):
        super().__init__("rope", name, factory)
        try:
            self.shows = {method for method in ("apply", "undo") if hasattr(factory(head_dim=8, base=1e4), method)}
        except Exception as error:
            raise KvminiError(f"{name}(head_dim=8, base=1e4) raised {type(error).__name__}: {_line(error)}") from None
        if "apply" not in self.shows:
            raise KvminiError(f"what {name} makes has no apply")

    def describe(self) -> str:
        return f"shows {', '.join(sorted(self.shows))}"


def policies() -> list[CachePolicy]:
    """A few thousand policies: axes, bits, windows, flush lengths, sinks, keys before or after RoPE."""
    found = []
    for group_size in (8, 32):
        sides = [Side(UniformQuantizer(n_bits, axis, group_size), residual, flush)
                 for n_bits, residual in product((2, 4), (0, 5, 32))
                 for axis, flush in (("per_token", None), ("per_token", 7), ("per_channel", None),
                                     ("per_channel", 3 * group_size))]
        found += [CachePolicy(key, value, sinks, pre_rope)
                  for key, value, sinks, pre_rope in product(sides, sides, (0, 1, 4), (False, True))]
    return found


class CacheOffer(Offer):
    """Somebody's `factory(n_layers, rope, policy)`, and the policies that it offers."""

    def __init__(self, name: str, factory: Callable):
        super().__init__("cache", name, factory)
        reason = ""
        self.policies: list[CachePolicy] = []
        asked = policies()
        for policy in asked:
            try:
                cache = factory(LAYERS, Rope(2 * policy.key.quantizer.group_size), policy)
            except NotImplementedError as error:
                reason = str(error)
                continue
            except Exception as error:
                raise KvminiError(f"{name}(n_layers, rope, policy) raised {type(error).__name__}: {error}") from None
            self.policies.append(policy)
            self.shows = {name for name in FACE if name in dir(cache)}
            if not self.shows >= {"append", "read"}:
                raise KvminiError(f"{name} gives a {type(cache).__name__} without append or read")
        self.n_asked = len(asked)
        if not self.policies:
            raise KvminiError(f"{name} offers no policy of the uniform quantizer: {reason}")

    def describe(self) -> str:
        return f"offers {len(self.policies)} of {self.n_asked} policies; shows {', '.join(sorted(self.shows))}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or "no reason given"


def _list(items: Iterable) -> str:
    return ", ".join(map(str, sorted(set(items))))
