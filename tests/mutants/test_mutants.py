"""The tests of the tests: each mistake is noticed by the law named in advance, and nothing that is right is blamed."""

from copy import copy
from functools import cache
from pathlib import Path

import mutant_caches
import mutant_crops
import mutant_grids
import mutant_kernels
import mutant_packers
import mutant_quantizers
import pytest
import variants
from hypothesis import Phase, settings

from kvmini.laws import LAWS, PROFILES, offer
from kvmini.laws.report import verdicts

TABLES = {"quantizer": mutant_grids.KILLED_BY | mutant_quantizers.KILLED_BY,
          "cache": mutant_caches.KILLED_BY | mutant_crops.KILLED_BY, "kernel": mutant_kernels.KILLED_BY,
          **mutant_packers.KILLED_BY}
MUTANTS = [pytest.param(kind, mutant, number, id=f"{kind}-{mutant.__name__}-{number}")
           for kind, table in TABLES.items() for mutant, numbers in table.items() for number in numbers.split()]
RIGHT = [pytest.param(kind, name, variant, id=f"{kind}-{name}")
         for kind, table in variants.RIGHT.items() for name, variant in table.items()]
HUNTS = [settings(PROFILES["ci"], max_examples=n, phases=[Phase.generate]) for n in (15, 200)]  # without shrinking


def test_the_readme_counts_them():
    mutants, right = len({(param.values[0], param.values[1]) for param in MUTANTS}), len(RIGHT)
    readme = " ".join((Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").split())
    assert f"each of {mutants} broken implementations" in readme and f"and {right} unusual but correct ones" in readme


@cache
def any_cache():
    return offer("cache", "kvmini:QuantizedKVCache")


def under_test(kind, name, factory):
    if kind != "cache":
        return offer(kind, name, factory)
    one = copy(any_cache())  # all of them offer the same policies, and asking takes a second
    one.name, one.factory = name, factory
    return one


@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")  # counterexamples are long
@pytest.mark.parametrize(("kind", "mutant", "number"), MUTANTS)
def test_the_law_named_in_advance_notices(kind, mutant, number):
    one = under_test(kind, mutant.__name__, mutant)
    found = (verdict for hunt in HUNTS for law in LAWS if law.number == number for verdict in verdicts(one, law, hunt))
    broken = next((verdict for verdict in found if verdict.outcome == "broken"), None)
    assert broken, f"{number} did not notice: {mutant.__doc__}"
    assert "could not be judged" not in broken.detail


@pytest.mark.parametrize(("kind", "name", "variant"), RIGHT)
def test_nothing_right_is_blamed(kind, name, variant):
    examples = 60 if name == "hidden" else 4 if kind == "cache" else 16  # a hidden float16 scale needs a rare bfloat16
    profile = settings(PROFILES["ci"], max_examples=examples)
    one = under_test(kind, name, variant)
    found = [verdict for law in LAWS for verdict in verdicts(one, law, profile)]
    assert not [str(verdict) for verdict in found if verdict.outcome == "broken"]
    assert sum(verdict.outcome == "kept" for verdict in found) >= len(found) / 2
