"""What a law is: a statement, the domain it is claimed for, and a check; and what it is to judge by it.

A law is judged on an `Offer`: somebody's implementation, and what it says it can do (`offers.py`). The verdict is
kept, broken (with the smallest counterexample that was found) or skipped (with the reason), never a silent pass.
Next file: `tensors.py`, the inputs.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis.errors import Flaky, Unsatisfiable
from torch import Tensor

from kvmini.errors import KvminiError

COMMON = {"deadline": None, "database": None, "report_multiple_bugs": False, "suppress_health_check": list(HealthCheck)}
PROFILES = {
    "dev": settings(max_examples=25, **COMMON),  # while writing one
    "ci": settings(max_examples=60, derandomize=True, **COMMON),  # the same examples every time
    "grade": settings(max_examples=400, derandomize=True, **COMMON),  # the same for every student, and more
    "hunt": settings(max_examples=5000, **COMMON),  # other examples every time
}


class Broken(AssertionError):
    """A law does not hold; the text says where."""


@dataclass(frozen=True)
class Law:
    """One law: `run(offer, variant, settings)` returns, or raises Broken with the smallest case found."""

    number: str
    kind: str  # of implementation: quantizer, packer, rope, cache, kernel
    name: str
    statement: str
    needs: tuple[str, ...]  # what an implementation must show for the law to be judged
    variants: tuple[str, ...] | None  # the axes it speaks of; None: all
    run: Callable[[Any, str, settings], None]

    @property
    def title(self) -> str:
        return self.name.replace("_", " ")


@dataclass(frozen=True)
class Verdict:
    """What judging one law gave. `detail` is the reason it was skipped, or the counterexample."""

    law: Law
    implementation: str
    variant: str
    outcome: str  # "kept", "broken", "skipped"
    detail: str = ""

    def row(self) -> dict[str, str]:
        return {"implementation": self.implementation, "kind": self.law.kind, "law": self.law.number,
                "title": self.law.title, "axis": self.variant, "outcome": self.outcome, "detail": self.detail}

    def __str__(self) -> str:
        name = " ".join(filter(None, (self.law.number, self.law.title + ",", self.variant)))
        if self.outcome == "kept":
            return f"{name}: kept by {self.implementation}"
        return f"{name} {self.outcome} by {self.implementation}\n  {self.law.statement}\n  {self.detail}"


LAWS: list[Law] = []


def law(number: str, kind: str, domain: Callable, needs: tuple[str, ...] = (),
        variants: tuple[str, ...] | None = None) -> Callable:
    """Enter a check into the book. `domain(offer, variant)` is the strategy it is called with; its docstring is
    the law's statement."""
    def enter(check: Callable[[Any], None]) -> Callable[[Any], None]:
        def run(offer, variant: str, profile: settings) -> None:
            @profile
            @given(domain(offer, variant))
            def holds(case):
                check(case)
            holds()
        LAWS.append(Law(number, kind, check.__name__, " ".join(check.__doc__.split()), needs, variants, run))
        return check
    return enter


def judge(law: Law, offer, variant: str = "", profile: str | settings = "dev") -> Verdict:
    """The verdict on one implementation under one law.

    Example:
        >>> from kvmini.laws import LAWS, offer
        >>> monotone = next(law for law in LAWS if law.number == "L05")
        >>> judge(monotone, offer("quantizer", "kvmini:UniformQuantizer"), "per_channel").outcome
        'kept'
    """
    def verdict(outcome: str, detail: str = "") -> Verdict:
        return Verdict(law, offer.name, variant, outcome, detail)

    if reason := offer.lacks(law, variant):
        return verdict("skipped", reason)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what overflows in somebody's numpy is judged by its result
            law.run(offer, variant, PROFILES[profile] if isinstance(profile, str) else profile)
    except Broken as broken:
        return verdict("broken", str(broken))
    except Flaky:
        return verdict("broken", "the same input did not give the same result twice")
    except Unsatisfiable:
        return verdict("skipped", "it offers nothing in the law's domain")
    except Exception as error:  # what somebody's class returned was not what it is said to return
        return verdict("broken", f"could not be judged: {type(error).__name__}: {error}")
    return verdict("kept")


def called(case, what: str, function: Callable, *args) -> Any:
    """The result of somebody's function; what it raises breaks the law, NotImplementedError leaves its domain."""
    try:
        return function(*args)
    except NotImplementedError:
        reject()
    except Broken:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise Broken(f"{case}: {what} raised {type(error).__name__}: {text[:300]}") from error


def within(case, what: str, actual: Tensor, expected: Tensor, bound: Tensor | float = 0.0) -> None:
    """Demand |actual - expected| <= bound everywhere; otherwise name the worst element."""
    if actual.shape != expected.shape:
        raise Broken(f"{case}: {what} has shape {list(actual.shape)}, expected {list(expected.shape)}")
    actual, expected = actual.double(), expected.double()
    bound = torch.as_tensor(bound, dtype=torch.float64).expand_as(actual)
    off = torch.where(actual == expected, 0, (actual - expected).abs())

    def text(i: tuple[int, ...]) -> str:
        near = f", at most {bound[i].item():.6g} away" if bound[i] else ""
        return f"{what} is {actual[i].item():.9g}, expected {expected[i].item():.9g}{near} (off by {off[i].item():.6g})"
    demand(case, off <= bound, text, worst=off - bound)


def demand(case, ok: Tensor, text: Callable[[tuple[int, ...]], str], worst: Tensor | None = None) -> None:
    """Demand that all of `ok` is true; otherwise say `text(index)` of the worst element (or the first)."""
    if ok.all():
        return
    badness = (~ok).double() if worst is None else torch.where(ok, -torch.inf, worst.nan_to_num(torch.inf, torch.inf))
    index = torch.unravel_index(badness.argmax(), ok.shape)
    i = tuple(n.item() for n in index)
    note = case.note(i) if hasattr(case, "note") else ""
    raise Broken(f"{case}: at {list(i)} {text(i)}{note}; {int((~ok).sum())} of {ok.numel()} elements")


def numbers(laws: list[Law] = LAWS) -> list[str]:
    return sorted({law.number for law in laws})


def chosen(names: list[str]) -> list[Law]:
    """The laws of those numbers; all of them for none.

    Raises:
        KvminiError that lists the numbers there are.
    """
    if unknown := set(names) - set(numbers()):
        raise KvminiError(f"no law {', '.join(sorted(unknown))}: there are {', '.join(numbers())}")
    return sorted((law for law in LAWS if not names or law.number in names), key=lambda law: law.number)
