"""The report: what is under test, a line a law, the broken ones in full. Next file: `door.py`, the same for pytest."""

import importlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from kvmini import policies
from kvmini.errors import KvminiError
from kvmini.laws.law import Law, Verdict, judge
from kvmini.laws.offers import CacheOffer, Offer, QuantizerOffer
from kvmini.laws.public import ADAPTERS

OURS = {"quantizer": "kvmini:UniformQuantizer", "cache": "kvmini:QuantizedKVCache",
        "kernel": "kvmini.laws.consumers:readable_kernel", "rope": "kvmini:Rope", "packer": "kvmini.packing"}
VARIABLES = {kind: f"KVMINI_{kind.upper()}" for kind in OURS}
VARIABLES["cache"] = "KVMINI_KV_CACHE"  # KVMINI_CACHE is the folder of the model
OFFERS = {"quantizer": QuantizerOffer, "cache": CacheOffer}


def offer(kind: str, name: str, factory: Callable | ModuleType | None = None) -> Offer:
    """What `module:factory` (or a module) offers. `factory` is what the name stands for, where it is at hand.

    Example:
        >>> offer("quantizer", "kvmini:UniformQuantizer").variants
        ('per_token', 'per_channel', 'per_tensor')
    """
    if factory is None:
        factory = policies.load_factory(name) if ":" in name else _module(name)
    return OFFERS[kind](name, factory) if kind in OFFERS else Offer(kind, name, factory)


def named(given: dict[str, str | None]) -> dict[str, str]:
    """What is under test, by kind: what was named, here or by a variable; all of ours where nothing was."""
    found = {kind: given.get(kind) or os.environ.get(variable) for kind, variable in VARIABLES.items()}
    return {kind: name for kind, name in found.items() if name} or OURS


def offers_of(names: dict[str, str]) -> list[Offer]:
    return [offer(kind, name) for kind, name in names.items()]


def public_offers() -> list[Offer]:
    """The public quantizers whose packages are installed; prints their versions, and which are not."""
    found = []
    for label, kind, factory, packages in ADAPTERS:
        try:
            versions = ", ".join(f"{package} {version(package)}" for package in packages)
        except PackageNotFoundError as error:
            print(f"{label} is skipped: {error}")
            continue
        print(f"{label}: {versions or 'its published formula'}")
        found.append(offer(kind, label, factory))
    return found


def default_profile() -> str:
    return "ci" if os.environ.get("CI") else "dev"


def verdicts(offer: Offer, law: Law, profile: str) -> Iterator[Verdict]:
    """One law on every axis of one implementation; nothing where it is of another kind."""
    if law.kind == offer.kind:
        for variant in offer.variants_of(law):
            yield judge(law, offer, variant, profile)


def line(found: list[Verdict]) -> str:
    """The verdicts on one law in a line: the outcome, where all agree, then the reasons of what was skipped."""
    outcomes = {}
    for verdict in found:
        outcomes.setdefault(verdict.outcome, []).append(verdict.variant)
    worst = min(outcomes, key=("broken", "skipped", "kept").index)
    text = f"{worst.upper() if worst == 'broken' else worst:7}  {found[0].law.number} {found[0].law.title}"
    if len(outcomes) > 1:
        text += ": " + "; ".join(f"{outcome} {', '.join(variants)}" for outcome, variants in outcomes.items())
    reasons = {verdict.detail for verdict in found if verdict.outcome == "skipped"}
    return text + (f" ({'; '.join(sorted(reasons))})" if reasons else "")


def show(offers: list[Offer], laws: list[Law], profile: str, quiet: bool) -> list[Verdict]:
    """Judge everything, printing a line a law as it comes."""
    found = []
    for one in offers:
        if not quiet:
            print("\n".join(one.header()), flush=True)
        for law in laws:
            judged = list(verdicts(one, law, profile))
            found += judged
            if judged and not quiet:
                print(f"  {line(judged)}", flush=True)
    return found


def matrix(found: list[Verdict]) -> str:
    """Laws down, implementations across: kept, broken (on which axes), or - where it was skipped."""
    tables = []
    for kind in dict.fromkeys(verdict.law.kind for verdict in found):
        rows = [verdict for verdict in found if verdict.law.kind == kind]
        names = list(dict.fromkeys(verdict.implementation for verdict in rows))
        cells = {(law, name): _cell([v for v in rows if (v.law, v.implementation) == (law, name)])
                 for law in dict.fromkeys(v.law for v in rows) for name in names}
        titles = {law: f"{law.number} {law.title}" for law, _ in cells}
        width = max(map(len, titles.values()))
        tables.append("\n".join([
            " ".join([f"{kind + 's':{width}}", *(f"{name:>14}" for name in names)]),
            *(" ".join([f"{title:{width}}", *(f"{cells[law, name]:>14}" for name in names)])
              for law, title in titles.items())]))
    return "\n\n".join(tables) + "\nnot: not promised; -: not offered or not shown; t, c: per_token, per_channel"


def _cell(verdicts: list[Verdict]) -> str:
    broken = [verdict.variant[4:5] for verdict in verdicts if verdict.outcome == "broken"]
    if broken:
        return f"BROKEN {' '.join(broken)}".strip()
    if any(verdict.outcome == "kept" for verdict in verdicts):
        return "kept"
    return "not" if any(verdict.detail.startswith("not promised") for verdict in verdicts) else "-"


def count(found: list[Verdict]) -> str:
    """How many were kept, broken and skipped."""
    outcomes = Counter(verdict.outcome for verdict in found)
    laws = len({verdict.law.number for verdict in found})
    return f"{laws} laws: " + ", ".join(f"{outcomes[outcome]} {outcome}" for outcome in ("kept", "broken", "skipped"))


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise KvminiError(f"cannot load {name!r}: {error}") from None
