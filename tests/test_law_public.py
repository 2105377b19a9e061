"""The adapters for public quantizers: judged where their package is installed, skipped by name where it is not."""

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from hypothesis import settings

from kvmini.laws import LAWS, PROFILES, offer
from kvmini.laws.public import ADAPTERS
from kvmini.laws.report import verdicts

COMMITTED = json.loads((Path(__file__).parents[1] / "notebooks/results/laws.json").read_text(encoding="utf-8"))["rows"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "factory", "packages"), ADAPTERS, ids=[row[0] for row in ADAPTERS])
def test_public_quantizers_break_no_other_laws_than_the_committed_run_found(name, kind, factory, packages):
    for package in packages:
        try:
            version(package)
        except PackageNotFoundError:
            pytest.skip(f"{package} is not installed")
    one, profile = offer(kind, name, factory), settings(PROFILES["ci"], max_examples=15)
    broken = [verdict for law in LAWS for verdict in verdicts(one, law, profile) if verdict.outcome == "broken"]
    known = {row["title"] for row in COMMITTED if (row["implementation"], row["outcome"]) == (name, "broken")}
    assert broken and {verdict.law.title for verdict in broken} <= known
    assert not [str(verdict) for verdict in broken if "could not be judged" in verdict.detail]
