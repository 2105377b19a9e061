"""Named recipes: the comparison table as code.

A policy spelled out is `k=axis:bits:group,v=axis:bits:group` and, where wanted, `residual=R`, `sinks=N`,
`pre-rope`, `symmetric`, `prefill=MODE`, and for one side alone `k-residual=R`, `k-flush=F`, `v-residual=R`,
`v-flush=F`. In place of `axis:bits:group` a side may name anybody's class, `module:factory:bits:group`
(called as `factory(n_bits=, axis=, group_size=)` with that side's natural axis, per_channel for keys and
per_token for values) or `module:factory:axis:bits:group`.

The named ones are nothing but spellings. It does not load models or run anything. Next: `model.py`.
"""

import importlib
import sys

from kvmini.axes import AXES
from kvmini.cache import CachePolicy
from kvmini.errors import KvminiError
from kvmini.quantizers.base import Quantizer
from kvmini.quantizers.uniform import UniformQuantizer
from kvmini.store import PREFILLS, Side

NAMED = {
    # KIVI's own rule (arXiv 2402.02750, section 3.2): keys wait until 128 are there and then go at once,
    # so 0 to 127 are exact (a sawtooth); of the values the last 128 are always exact.
    "kivi-2": "k=per_channel:2:32,k-flush=128,v=per_token:2:32,v-residual=128",
    "kivi-4": "k=per_channel:4:32,k-flush=128,v=per_token:4:32,v-residual=128",
    # The four ways to spend two bits: key axis, value axis (t = per_token, c = per_channel); no window.
    "t-t-2": "k=per_token:2:32,v=per_token:2:32",
    "t-c-2": "k=per_token:2:32,v=per_channel:2:32",
    "c-t-2": "k=per_channel:2:32,v=per_token:2:32",
    "c-c-2": "k=per_channel:2:32,v=per_channel:2:32",
}
NAMES = ("exact", *NAMED)
NATURAL_AXIS = {"k": "per_channel", "v": "per_token"}
NUMBERS = ("residual", "sinks", "k-residual", "k-flush", "v-residual", "v-flush")
SWITCHES = ("pre-rope", "symmetric")
GRAMMAR = (f"names: {', '.join(NAMES)}; or spelled out: k=AXIS:BITS:GROUP,v=AXIS:BITS:GROUP with AXIS one of "
           f"{', '.join(AXES)}, and any of {', '.join(f'{n}=N' for n in NUMBERS)}, {', '.join(SWITCHES)}, "
           f"prefill={'|'.join(PREFILLS)}")


def get(policy: str, n_bits: int | None = None, group_size: int | None = None) -> CachePolicy | None:
    """The policy of that name or spelling; None for "exact". `n_bits` and `group_size` replace its own.

    Raises:
        KvminiError that lists what is allowed.
    Example:
        >>> get("kivi-2") == get("k=per_channel:2:32,k-flush=128,v=per_token:2:32,v-residual=128")
        True
        >>> get("c-t-2", n_bits=4).key.quantizer.n_bits
        4
    """
    if policy == "exact":
        return None
    fields = _fields(NAMED.get(policy, policy))
    number = {name: _number(fields[name], name) for name in NUMBERS if name in fields}
    sides = {}
    for side in ("k", "v"):
        if side not in fields:
            raise KvminiError(f"unknown policy {policy!r}: {GRAMMAR}")
        quantizer = _quantizer(fields[side], side, n_bits, group_size, "symmetric" in fields)
        residual = number.get(f"{side}-residual", number.get("residual", 0))
        sides[side] = Side(quantizer, residual, number.get(f"{side}-flush"))
    return CachePolicy(sides["k"], sides["v"], number.get("sinks", 0), "pre-rope" in fields,
                       fields.get("prefill", "exact"))


def _fields(spelling: str) -> dict[str, str]:
    fields = {}
    for field in spelling.split(","):
        name, equals, value = field.strip().partition("=")
        known = name in SWITCHES if not equals else name in ("k", "v", "prefill", *NUMBERS)
        if not known:
            raise KvminiError(f"unknown policy or field {field.strip()!r}: {GRAMMAR}")
        if name in fields:
            raise KvminiError(f"{name!r} is given twice in policy {spelling!r}")
        fields[name] = value
    return fields


def _number(text: str, name: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise KvminiError(f"{name} must be a whole number, not {text!r}")
    return int(text)


def _quantizer(spelling: str, side: str, n_bits: int | None, group_size: int | None, symmetric: bool) -> Quantizer:
    words = spelling.split(":")
    if not 3 <= len(words) <= 5:
        raise KvminiError(f"{side}={spelling!r} must be AXIS:BITS:GROUP, MODULE:FACTORY:BITS:GROUP or "
                          "MODULE:FACTORY:AXIS:BITS:GROUP")
    *kind, bits, group = words
    n_bits = _number(bits, f"bits of {side}") if n_bits is None else n_bits
    group_size = _number(group, f"group of {side}") if group_size is None else group_size
    if len(kind) == 1:
        return UniformQuantizer(n_bits, kind[0], group_size, symmetric)
    if symmetric:
        raise KvminiError(f"'symmetric' applies to the uniform quantizer only, not to {spelling!r}")
    axis = kind[2] if len(kind) == 3 else NATURAL_AXIS[side]
    name = f"{kind[0]}:{kind[1]}"
    try:
        return load_factory(name)(n_bits=n_bits, axis=axis, group_size=group_size)
    except (TypeError, NotImplementedError) as error:
        raise KvminiError(f"{name}(n_bits={n_bits}, axis={axis!r}, group_size={group_size}) does not work: "
                          f"{type(error).__name__}: {error}") from None


def load_factory(name: str):
    """What `module:attribute` names; modules are found from the current folder and PYTHONPATH."""
    module, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # whatever somebody's module does when it is imported
        raise KvminiError(f"cannot load {name!r}: {type(error).__name__}: {error}") from None
