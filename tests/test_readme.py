"""The README tells the truth: its example, its table, its line counts, its reading order."""

import ast
import contextlib
import io
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

import kvmini
from kvmini import claims
from kvmini.__main__ import main
from kvmini.catalogue import EXPERIMENTS
from kvmini.laws.law import numbers
from kvmini.laws.report import matrix
from kvmini.tables import table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)
READING = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", README, flags=re.MULTILINE)


def lines_of(name):
    return len((ROOT / "kvmini" / name).read_text(encoding="utf-8").splitlines())


def test_the_reading_order_names_every_file_once_with_its_length():
    names = [name for name, _ in READING]
    files = [str(path.relative_to(ROOT / "kvmini")) for path in (ROOT / "kvmini").rglob("*.py")]
    assert sorted(names) == sorted(name for name in files if not name.endswith("__init__.py"))
    for name, lines in READING:
        assert int(lines) == lines_of(name), f"README says {lines} lines for {name}"
    assert max(map(lines_of, names)) <= 300


def test_imports_point_upward_only():
    order = [name.removesuffix(".py").replace("/", ".") for name, _ in READING]
    for place, name in enumerate(order):
        tree = ast.parse((ROOT / "kvmini" / READING[place][0]).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "kvmini":
                module = node.module.removeprefix("kvmini").strip(".")
                package = not module or (ROOT / "kvmini" / module.replace(".", "/")).is_dir()
                for target in [".".join(filter(None, (module, alias.name))) if package else module
                               for alias in node.names]:
                    assert order.index(target) < place, f"{name} imports {target}, which stands below it"


def test_the_package_says_the_same_reading_order():
    said = re.search(r"Reading order: (.*?)\. ", " ".join(kvmini.__doc__.split())).group(1)
    said = said.replace("; then the law-book", "").replace("; and", ",")
    assert [name.strip() for name in said.split(",")] == [name.removesuffix(".py") for name, _ in READING]


def test_each_file_names_the_next():
    names = [name for name, _ in READING]
    for name, after in pairwise(names):
        doc = " ".join(ast.get_docstring(ast.parse((ROOT / "kvmini" / name).read_text(encoding="utf-8"))).split())
        said = re.search(r"Next(?: file)?: `([\w/]+\.py)`|`([\w/]+\.py)`, the next file", doc)
        if said is not None:
            said = said[1] or said[2]
            assert after in (said, f"{Path(name).parent}/{said}"), f"{name} says {said}, the README {after}"


def test_the_numbers_of_the_first_screen_are_counted():
    counts = re.search(r"(\d,\d+) lines of Python in (\d+) files.* (\d+) laws \((\d,\d+)\s+lines in (\d+) files",
                       README, flags=re.DOTALL).groups()
    mechanism = [name for name, _ in READING[:READING.index(next(row for row in READING if row[0] == "texts.py"))]]
    said = re.search(r"is (\d,\d+) of them in the first (\d+) files", README).groups()
    assert said == (f"{sum(map(lines_of, mechanism)):,}", str(len(mechanism)))
    laws = [name for name, _ in READING if name.startswith("laws/")]
    lines = [sum(lines_of(name) for name, _ in READING if (name in laws) == of_laws) for of_laws in (False, True)]
    assert [int(count.replace(",", "")) for count in counts] == [
        lines[0], len(READING) - len(laws), len(numbers()), lines[1], len(laws)]


def test_the_table_is_that_of_the_committed_run():
    result = json.loads((ROOT / "notebooks" / "results" / "ablate.json").read_text(encoding="utf-8"))
    assert table(result["rows"], EXPERIMENTS["ablate"].columns["rows"]) in README
    perplexity = {row["name"]: round(row["perplexity"]) for row in result["rows"]}
    right, worst, exact = map(int, re.search(r"(\d+) against (\d+) for the worst choice, (\d+) with nothing", " ".join(
        README.split())).groups())
    assert (right, exact) == (perplexity["K per_channel V per_token"], perplexity["exact"])
    assert worst == max(perplexity.values())
    four = re.search(r"CoQA: ([\d., ]+) of ([\d.]+)\)", README).groups()
    assert four == ("63.53, 52.93, 2.88, 2.80", "66.37")  # the article's, rows of KIVI's Table 3


def test_the_claims_are_those_of_the_committed_run():
    content = json.loads((ROOT / "notebooks" / "results" / "claims.json").read_text(encoding="utf-8"))
    rows = content["rows"]
    assert " ".join(EXPERIMENTS["flips"].findings(content["results"]["flips"])[1:]) in " ".join(README.split())
    assert claims.text(rows) in README
    wanted = int(re.search(r"(\d+) claims of the article measured", README).group(1))
    assert wanted == len({row["number"] for row in rows})


def test_the_longer_reach_is_that_of_the_committed_run():
    result = json.loads((ROOT / "notebooks" / "results" / "reach-4096.json").read_text(encoding="utf-8"))
    said = ", ".join(f"{row['name']} {row['rise_mean']:+.2f}% ± {row['half_mean']:.2f}"
                     for row in result["rows"] if row["name"].startswith("found"))
    assert said in " ".join(README.split()) and result["tokens"] == 4096


@pytest.mark.parametrize("name", ["frontier", "reach"])
def test_the_frontier_is_that_of_the_committed_runs(name):
    result = json.loads((ROOT / "notebooks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    assert table(result["rows"], EXPERIMENTS[name].columns["rows"]) in README
    for sentence in EXPERIMENTS[name].findings(result)[:3 if name == "reach" else 1]:
        assert sentence in " ".join(README.split())


def test_the_table_of_public_quantizers_is_that_of_the_committed_run():
    result = json.loads((ROOT / "notebooks" / "results" / "laws.json").read_text(encoding="utf-8"))
    assert matrix(result["rows"]) in README and f"profile `{result['profile']}`" in README
    for package in {package for packages in result["versions"].values() for package in packages.split(", ") if package}:
        assert package in " ".join(README.split())


def test_the_example_of_the_law_book_breaks_the_law_as_shown(tmp_path, monkeypatch, capsys):
    code = next(text for kind, text in BLOCKS if kind == "python" and "class Mine" in text)
    shown = next(text for kind, text in BLOCKS if "broken by mine:factory" in text)
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["laws", "--quantizer", "mine:factory", "--law", "L09"]) == 1
    got, wanted = (re.sub(r"-?\d[\d.e-]*", "N", " ".join(text.split())) for text in (capsys.readouterr().out, shown))
    assert wanted in got  # which numbers the smallest case has is hypothesis's choice


def test_the_two_commands_install_everything_and_run():
    commands = [text.strip() for kind, text in BLOCKS if not kind and "pip install" in text]
    assert [command.split("&&")[-1].strip() for command in commands] == ["python -m kvmini", "pytest"]
    assert all("pip install -r requirements.txt" in command for command in commands)


@pytest.mark.slow
def test_the_example_prints_what_the_readme_shows():
    """Names and bytes to the letter; 2-bit perplexities may move with the machine's float32 sums, not in order."""
    code = next(text for kind, text in BLOCKS if kind == "python")
    shown = next(text for kind, text in BLOCKS if text.startswith("exact "))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    got, wanted = ([line.split() for line in text.strip().splitlines()] for text in (printed.getvalue(), shown))
    assert [(row[0], *row[2:]) for row in got] == [(row[0], *row[2:]) for row in wanted]
    got, wanted = ([float(row[1]) for row in rows] for rows in (got, wanted))
    assert got == pytest.approx(wanted, rel=0.25) and got[0] == pytest.approx(wanted[0], rel=1e-3)
    assert sorted(got) == got
