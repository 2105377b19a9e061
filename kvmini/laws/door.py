"""The door for pytest: one test a law and axis. A conftest.py and a test file of one line each open it:

    from kvmini.laws.door import pytest_addoption, pytest_generate_tests, pytest_report_header
    from kvmini.laws.door import test_law

`pytest --quantizer module:factory` (or the variable KVMINI_QUANTIZER) then judges that one; without, kvmini's own.
`--cache`, `--kernel`, `--rope`, `--packer` likewise; `--laws-profile` as in law.py. What is skipped says why.
"""

import pytest

from kvmini.errors import KvminiError
from kvmini.laws.law import LAWS, PROFILES, Verdict, judge
from kvmini.laws.report import OURS, VARIABLES, named, offers_of


def pytest_addoption(parser):
    group = parser.getgroup("laws", "the law-book of kvmini")
    for kind in OURS:
        group.addoption(f"--{kind}", metavar="MODULE:FACTORY", help=f"the {kind} under test (or {VARIABLES[kind]})")
    group.addoption("--laws-profile", choices=tuple(PROFILES), help="how many examples (default: ci)")


def _offers(config):
    """What is under test, found out once a session."""
    if not hasattr(config, "kvmini_offers"):
        try:
            config.kvmini_offers = offers_of(named({kind: config.getoption(kind, None) for kind in OURS}))
        except KvminiError as error:
            raise pytest.UsageError(str(error)) from None
    return config.kvmini_offers


def pytest_report_header(config):
    return [line for offer in _offers(config) for line in offer.header()]


def pytest_generate_tests(metafunc):
    if "law" in metafunc.fixturenames:
        cases = [pytest.param(law, offer, variant, id=" ".join((law.number, offer.kind, variant, law.name)))
                 for offer in _offers(metafunc.config) for law in LAWS if law.kind == offer.kind
                 for variant in offer.variants_of(law)]
        metafunc.parametrize(("law", "offer", "variant"), cases)


def test_law(law, offer, variant, pytestconfig):
    verdict: Verdict = judge(law, offer, variant, pytestconfig.getoption("--laws-profile", None) or "ci")
    if verdict.outcome == "skipped":
        pytest.skip(verdict.detail)
    if verdict.outcome == "broken":
        pytest.fail(str(verdict), pytrace=False)
