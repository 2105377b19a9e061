"""Named recipes: the comparison table as code.

A policy spelled out is `k=SIDE,v=SIDE` (`spellings.py` says what a side can be; `axis:bits:group` is the uniform
quantizer) and, where wanted, `residual=R`, `sinks=N`, `pre-rope`, `symmetric`, `prefill=MODE`, and for one side alone
`k-residual=R`, `k-flush=F`, `v-residual=R`, `v-flush=F`; or `x=SIDE` alone, the layer input that keys and values
are made of again. `sinks=massive` is as many as calibration found.

The named ones are nothing but spellings. It does not load models or run anything. Next: `evaluate.py`.
"""

from functools import cache

from kvmini.cache import CachePolicy
from kvmini.calibration import Calibration
from kvmini.errors import KvminiError
from kvmini.remat import RematPolicy
from kvmini.side import Side
from kvmini.spellings import SIDE, Spelled, number
from kvmini.store import PREFILLS

Policy = CachePolicy | RematPolicy
FOUND = "residual=128,sinks=4,pre-rope"
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
    # KVQuant (arXiv 2401.18079): nuqB-1% with one sink, no window; Q-Norm at 2 bits.
    **{f"kvquant-{b}": f"k=outliers+nonuniform:{b},v=outliers+nonuniform:{b},sinks=1,pre-rope" for b in (2, 3, 4)},
    # RotateKV (arXiv 2501.16383): no window; groups of 64 where the paper has 128; clipped at 2 bits.
    **{f"rotatekv-{b}": f"k=hadamard+reordered+{clip}per_token:{b}:64,v=hadamard+{clip}per_token:{b}:64,sinks=massive,"
                        "pre-rope" for b, clip in ((2, "clipped+"), (3, ""), (4, ""))},
    # InnerQ (arXiv 2602.23200): 32 sinks and 96 recent tokens.
    "innerq-base": "k=normalized+per_token:3:32,v=per_channel:3:32,symmetric,sinks=32,residual=96",
    "innerq-small": "k=normalized+per_token:3:32,v=per_channel:2:32,symmetric,sinks=32,residual=96",
    "innerq-hybrid": "k=normalized+per_token:3:32,v=hybrid:per_channel:2:32,symmetric,sinks=32,residual=96",
    # FP8 as in vLLM: scale 1, or calibrated over a layer's tensor.
    **{f"fp8-{f}": f"k={f},v={f}" for f in ("e4m3", "e5m2")},
    **{f"fp8-{f}-calibrated": f"k={f}:per_tensor,v={f}:per_tensor" for f in ("e4m3", "e5m2")},
    # XQuant (arXiv 2508.10395): one group of recent tokens; groups of 64, which divide 576, where the paper has 128.
    **{f"xquant-{b}": f"x=per_token:{b}:64,residual=128" for b in (2, 3, 4)},
    **{f"xquant-svd-{b}": f"k=svd+per_channel:{b}:128,v=svd+per_token:{b}:64,residual=128,pre-rope" for b in (2, 3, 4)},
    # Found by search on this model (`experiments/reach.py`): rotated values at fitted levels, outliers of keys apart.
    "found-2.5": f"k=outliers+nonuniform:2,v=hadamard+nonuniform:2,{FOUND}",
    "found-3": f"k=outliers+nonuniform:3,v=hadamard+nonuniform:2,{FOUND}",
    "found-4.5": f"k=per_channel:4:64,v=hadamard+nonuniform:4,{FOUND}",
}
NAMES = ("exact", *NAMED)
NUMBERS = ("residual", "sinks", *(f"{side}-{what}" for side in "kvx" for what in ("residual", "flush")))
SWITCHES = ("pre-rope", "symmetric")
GRAMMAR = (f"names: {', '.join(NAMES)}; or spelled out: k=SIDE,v=SIDE (or x=SIDE) and any of "
           f"{', '.join(f'{n}=N' for n in NUMBERS)}, {', '.join(SWITCHES)}, prefill={'|'.join(PREFILLS)}; "
           f"SIDE is {SIDE}")


def needs_calibration(policy: str) -> bool:
    """Whether `get` wants a calibration for it.

    Raises:
        KvminiError as `get`, as far as can be told without one.
    Example:
        >>> needs_calibration("kivi-2"), needs_calibration("kvquant-3")
        (False, True)
    """
    if policy == "exact":
        return False
    fields = _fields(policy)
    return fields.get("sinks") == "massive" or any(side.needs_calibration for side in _sides(fields).values())


def get(policy: str, n_bits: int | None = None, group_size: int | None = None,
        calibration: Calibration | None = None) -> Policy | None:
    """The policy of that name or spelling; None for "exact". `n_bits` and `group_size` replace its own.

    Raises:
        KvminiError that lists what is allowed, or says that the policy needs a calibration.
    Example:
        >>> get("kivi-2") == get("k=per_channel:2:32,k-flush=128,v=per_token:2:32,v-residual=128")
        True
        >>> get("c-t-2", n_bits=4).key.quantizer.n_bits
        4
    """
    if policy == "exact":
        return None
    if calibration is None and needs_calibration(policy):
        raise KvminiError(f"{policy!r} needs a calibration of the model: kvmini.calibrate(model, ids)")
    fields = _fields(policy)
    sinks = fields.get("sinks", "0")
    sinks = calibration.sinks if sinks == "massive" else number(sinks, "sinks")
    sides = {}
    for side, spelled in _sides(fields, n_bits, group_size).items():
        length, flush = (fields.get(f"{side}-{what}", fields.get(what)) for what in ("residual", "flush"))
        sides[side] = Side(_of_layers(spelled, calibration), number(length or "0", "residual"),
                           None if flush is None else number(flush, f"{side}-flush"))
    prefill = fields.get("prefill", "exact")
    if "x" in sides:
        return RematPolicy(sides["x"], sinks, prefill)
    return CachePolicy(sides["k"], sides["v"], sinks, "pre-rope" in fields, prefill)


def _of_layers(spelled: Spelled, calibration: Calibration | None):
    """One quantizer for all layers, or, from a calibration, one for each."""
    if not spelled.needs_calibration:
        return spelled.quantizer()
    return cache(lambda layer: spelled.quantizer(calibration, layer))


def _fields(policy: str) -> dict[str, str]:
    spelling, fields = NAMED.get(policy, policy), {}
    for field in spelling.split(","):
        name, equals, value = field.strip().partition("=")
        known = name in SWITCHES if not equals else name in ("k", "v", "x", "prefill", *NUMBERS)
        if not known:
            raise KvminiError(f"unknown policy or field {field.strip()!r}: {GRAMMAR}")
        if name in fields:
            raise KvminiError(f"{name!r} is given twice in policy {spelling!r}")
        if name in NUMBERS and (name, value) != ("sinks", "massive"):
            number(value, name)
        fields[name] = value
    if {"k", "v", "x"} & fields.keys() not in ({"k", "v"}, {"x"}):
        raise KvminiError(f"policy {policy!r} must say k= and v=, or x= alone: {GRAMMAR}")
    if "x" in fields and "pre-rope" in fields:
        raise KvminiError("'pre-rope' is what x= always is: leave it out")
    return fields


def _sides(fields: dict[str, str], n_bits: int | None = None, group_size: int | None = None) -> dict[str, Spelled]:
    return {side: Spelled(fields[side], side, "symmetric" in fields, n_bits, group_size)
            for side in ("k", "v", "x") if side in fields}
