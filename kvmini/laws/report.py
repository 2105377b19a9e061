"""The report: what is under test, a line a law, the broken ones in full. Next file: `door.py`, the same for pytest."""

import importlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from kvmini.errors import KvminiError
from kvmini.laws.law import Law, Verdict, judge
from kvmini.laws.offers import CacheOffer, Offer, QuantizerOffer, RopeOffer
from kvmini.laws.public import ADAPTERS
from kvmini.spellings import load_factory

OURS = {"quantizer": "kvmini:UniformQuantizer", "cache": "kvmini:QuantizedKVCache",
        "kernel": "kvmini.kernels.decode:decode", "rope": "kvmini:Rope", "packer": "kvmini.packing"}
VARIABLES = {kind: f"KVMINI_{kind.upper()}" for kind in OURS}
VARIABLES["cache"] = "KVMINI_KV_CACHE"  # KVMINI_CACHE is the folder of the model
OFFERS = {"quantizer": QuantizerOffer, "cache": CacheOffer, "rope": RopeOffer}


def offer(kind: str, name: str, factory: Callable | ModuleType | None = None) -> Offer:
    """What `module:factory` (or a module) offers. `factory` is what the name stands for, where it is at hand.

    Example:
        >>> offer("quantizer", "kvmini:UniformQuantizer").variants
        ('per_token', 'per_channel', 'per_tensor')
    """
    if factory is None and kind != "packer" and ":" not in name:
        raise KvminiError(f"a {kind} is named MODULE:FACTORY, not {name!r}")
    if factory is None:
        factory = load_factory(name) if ":" in name else _module(name)
    return OFFERS[kind](name, factory) if kind in OFFERS else Offer(kind, name, factory)


def named(given: dict[str, str | None]) -> dict[str, str]:
    """What is under test, by kind: what was named, here or by a variable; all of ours where nothing was."""
    found = {kind: given.get(kind) or os.environ.get(variable) for kind, variable in VARIABLES.items()}
    return {kind: name for kind, name in found.items() if name} or OURS


def offers_of(names: dict[str, str]) -> list[Offer]:
    return [offer(kind, name) for kind, name in names.items()]


def public_offers() -> tuple[list[Offer], dict[str, str]]:
    """The public quantizers whose packages are installed, and the versions of each; prints which are not."""
    found, versions = [], {}
    for label, kind, factory, packages in ADAPTERS:
        try:
            versions[label] = ", ".join(f"{package} {version(package)}" for package in packages)
        except PackageNotFoundError as error:
            print(f"{label} is skipped: {error}")
            continue
        found.append(offer(kind, label, factory))
    return found, versions


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


def matrix(rows: list[dict[str, str]]) -> str:
    """Verdicts (as `Verdict.row` gives them) as a table: laws down, implementations across."""
    tables = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        of_kind = [row for row in rows if row["kind"] == kind]
        names = list(dict.fromkeys(row["implementation"] for row in of_kind))
        cells: dict[str, dict[str, list]] = {}
        for row in of_kind:
            law = cells.setdefault(f"{row['law']} {row['title']}", {name: [] for name in names})
            law[row["implementation"]].append(row)
        width = max(map(len, cells))
        lines = [(f"{kind}s", names), *((law, [_cell(cell) for cell in row.values()]) for law, row in cells.items())]
        tables += ["\n".join(" ".join([f"{law:{width}}", *(f"{text:>12}" for text in texts)]) for law, texts in lines)]
    tables.append("not: given up on purpose; -: not offered or not shown; t, c: per_token, per_channel")
    return "\n\n".join(tables)


def _cell(rows: list[dict[str, str]]) -> str:
    """BROKEN (on which axes), kept, not (promised), or - where it was skipped."""
    broken = [row["axis"].removeprefix("per_")[:1] for row in rows if row["outcome"] == "broken"]
    if broken:
        return " ".join(filter(None, ["BROKEN", *broken]))
    if any(row["outcome"] == "kept" for row in rows):
        return "kept"
    return "not" if any(row["detail"].startswith("not promised") for row in rows) else "-"


def count(found: list[Verdict]) -> str:
    """How many were kept, broken and skipped."""
    outcomes = Counter(verdict.outcome for verdict in found)
    laws = len({verdict.law.number for verdict in found})
    said = ", ".join(f"{outcomes[outcome]} {outcome}" for outcome in ("kept", "broken", "skipped"))
    return f"{len(found)} checks of {laws} law{'s' * (laws != 1)}: {said}"


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise KvminiError(f"cannot load {name!r}: {error}") from None
