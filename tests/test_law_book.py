"""The law-book itself: what it finds out, what it says, and the statements that are claimed not to be laws."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvmini import KvminiError, Rope, Stored, UniformQuantizer
from kvmini.__main__ import main
from kvmini.laws import LAWS, OURS, PROFILES, judge, kv_tensors, offer
from kvmini.laws.cases import ulp
from kvmini.laws.law import numbers
from kvmini.laws.memory import reachable_nbytes
from kvmini.laws.tensors import ALL_KINDS
from kvmini.quantizers.base import FLOATS

STUDENT = '''
import numpy as np

class Rounder:
    """Plain numpy, per token, everything rounded to halves."""
    block = 1
    does_not_promise = {"L26": "no check of the input"}
    def quantize(self, x):
        return np.round(np.asarray(x, np.float32) * 2) / 2
    def dequantize(self, stored):
        return stored

def make(n_bits, axis, group_size):
    if axis != "per_token":
        raise NotImplementedError("only per token so far")
    return Rounder()
'''


@pytest.fixture
def student(tmp_path, monkeypatch):
    (tmp_path / "student.py").write_text(STUDENT)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("student", None)


def law(number, name=""):
    return next(law for law in LAWS if law.number == number and name in law.name)


def quantizer(factory):
    return offer("quantizer", "somebody:factory", factory)


def test_laws_are_numbered_without_a_gap_and_stated():
    assert numbers() == [f"L{n:02}" for n in range(1, len(numbers()) + 1)]
    for one in LAWS:
        assert len(one.statement) > 30 and one.statement.endswith((".", ")")) and one.kind in OURS
    assert len({(one.number, one.name) for one in LAWS}) == len(LAWS)


def test_what_kvmini_itself_does_not_promise():
    """Frozen: a law that is given up shows here."""
    given_up = {name: offer(kind, name).does_not_promise for kind, name in OURS.items()}
    assert given_up == {"kvmini:UniformQuantizer": {}, "kvmini:QuantizedKVCache": {},
                        "kvmini.kernels.decode:decode": {}, "kvmini:Rope": {}, "kvmini.packing": {}}


# --- what a verdict says

class Coarse(UniformQuantizer):
    """Every element ends up at code 0: off by up to the whole range."""

    def dequantize(self, stored):
        return super().dequantize(stored).flatten()[:1].expand(stored.shape).clone()


def test_a_broken_law_says_everything_that_is_needed():
    verdict = judge(law("L03"), quantizer(Coarse), "per_channel")
    assert verdict.outcome == "broken"
    text = str(verdict)
    for part in ("L03", "half a step", "somebody:factory", "scale / 2", r"float\d+ \[1, 1, \d+, \d\]", r"\d bits",
                 r"per_channel, groups of \d", r"at \[\d, \d, \d, \d\] x_hat is ", r"expected -?\d", r"at most \d",
                 r"off by \d", r"its group runs from -?\d.* to -?\d", r"stored scale \d", r"\d of \d+ elements"):
        assert re.search(part, text), (part, text)


def test_what_is_not_offered_is_skipped_with_a_reason_never_passed(student):
    found = offer("quantizer", "student:make")
    assert found.variants == ("per_token",) and found.is_numpy
    header = "\n".join(found.header())
    for part in ("under test: student:make", "per_token (1, 2, 3, 4, 5, 6, 7, 8 bits",
                 "numpy float16, float32, float64", "does not offer per_channel", "only per token so far",
                 "shows block", "does not promise L26: no check of the input"):
        assert part in header, (part, header)
    outcomes = {one.number: judge(one, found, "per_token") for one in LAWS if one.kind == "quantizer"}
    assert outcomes["L26"].outcome == "skipped" and "no check of the input" in outcomes["L26"].detail
    assert outcomes["L08"].outcome == "skipped" and "per_channel" in outcomes["L08"].detail
    assert outcomes["L06"].outcome == "skipped" and "codes" in outcomes["L06"].detail
    assert outcomes["L05"].outcome == "kept" and outcomes["L03"].outcome == "broken"


def test_a_class_that_raises_breaks_the_law_and_says_with_what():
    class Raises(UniformQuantizer):
        def dequantize(self, stored):
            if stored.n_tokens == 1:  # what is asked first has more
                raise RuntimeError("no so few\ntokens")
            return super().dequantize(stored)
    verdict = judge(law("L05"), quantizer(Raises), "per_token", "ci")
    assert verdict.outcome == "broken" and "dequantize raised RuntimeError: no so few tokens" in verdict.detail


def test_chance_is_no_excuse():
    class Random(UniformQuantizer):
        def dequantize(self, stored):
            return super().dequantize(stored) + torch.rand(())
    assert judge(law("L25"), quantizer(Random), "per_token").outcome == "broken"


def test_the_fixed_profiles_find_the_same_every_time():
    for profile in ("ci", "grade"):
        first, second = (str(judge(law("L03"), quantizer(Coarse), "per_token", profile)) for _ in range(2))
        assert first == second
    assert [PROFILES[name].max_examples for name in ("dev", "ci", "grade", "hunt")] == [25, 60, 400, 5000]


@pytest.mark.parametrize(("factory", "says"), [
    (lambda n_bits, axis, group_size: object(), "without quantize"),
    (lambda n_bits, axis: None, "TypeError"),
    (lambda **settings: (_ for _ in ()).throw(NotImplementedError("nothing yet")), "no axis.*nothing yet"),
    (lambda **settings: type("Text", (), {"quantize": str, "dequantize": str})(), "neither torch nor numpy"),
    (type("Odd", (UniformQuantizer,), {"does_not_promise": {"L99": "?"}}), "L99"),
    (type("List", (UniformQuantizer,), {"does_not_promise": ["L24"]}), "does_not_promise.*dict")])
def test_what_is_no_quantizer_is_refused_in_a_line(factory, says):
    with pytest.raises(KvminiError, match=says) as error:
        quantizer(factory)
    assert "\n" not in str(error.value)


def test_a_rope_without_undo_is_not_blamed_for_it():
    class Forward:
        apply = Rope.apply
        turn, cos_sin, _check = staticmethod(Rope.turn), Rope.cos_sin, Rope._check

        def __init__(self, head_dim, base):
            self.head_dim, self.base, self.factors = head_dim, base, None
    found = [judge(one, offer("rope", "somebody:rope", Forward)) for one in LAWS if one.kind == "rope"]
    assert [(v.law.name, v.outcome) for v in found if v.outcome != "kept"] == [("undo_is_the_inverse", "skipped")]


def test_a_minimum_that_is_shown_must_be_the_one_that_is_read():
    class Negated(Stored):
        minimum = property(lambda self: -self.parts["minimum"])

    class Shows(UniformQuantizer):
        def quantize(self, x):
            return Negated(**vars(super().quantize(x)))
    verdict = judge(law("L16", "shown"), quantizer(Shows), "per_token", "ci")
    assert verdict.outcome == "broken" and "minimum" in verdict.detail


# --- the two ways in

def test_the_command_prints_header_verdicts_and_the_smallest_case(student, capsys):
    assert main(["laws", "--quantizer", "student:make", "--law", "L24", "L05", "L26", "--json", "laws.json"]) == 1
    out = capsys.readouterr().out
    for part in ("quantizer under test: student:make", "BROKEN   L24 half to even", "kept     L05 monotone",
                 "skipped  L26", "3 checks of 3 laws: 1 kept, 1 broken, 1 skipped", "[1, 1, 1, "):
        assert part in out, (part, out)
    assert '"outcome": "broken"' in (student / "laws.json").read_text()
    assert main(["laws", "--packer", "kvmini.packing", "--quiet"]) == 0
    assert capsys.readouterr().out == "2 checks of 1 law: 2 kept, 0 broken, 0 skipped\n"


@pytest.mark.parametrize("argv", [["--quantizer", "no_such:thing"], ["--packer", "no_such"], ["--law", "L99"],
                                  ["--quantizer", "math:pi"], ["--cache", "kvmini:KvminiError"],
                                  ["--quantizer", "kvmini"], ["--packer", "kvmini.packing", "--law", "L03"],
                                  ["--rope", "kvmini:KvminiError"], ["--quantizer", "antigravity_of_mine:exits"]])
def test_mistakes_are_one_line_and_status_2(argv, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "antigravity_of_mine.py").write_text("import sys; sys.exit(0)")
    assert main(["laws", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("kvmini: ") and captured.err.count("\n") == 1


@pytest.mark.slow
def test_pytest_takes_the_option_and_the_variable(student):
    door = str(Path(__file__).parent / "laws")
    for options, variable in ((["--quantizer", "student:make"], None), ([], "student:make")):
        environment = {**os.environ, "PYTHONPATH": str(student)} | ({"KVMINI_QUANTIZER": variable} if variable else {})
        command = [sys.executable, "-m", "pytest", door, "-k", "L05 or L08 or half_to_even", "-rs", "-v", *options]
        done = subprocess.run(command, env=environment, text=True, capture_output=True)
        assert "quantizer under test: student:make" in done.stdout, done.stdout + done.stderr
        assert "1 failed, 1 passed, 1 skipped" in done.stdout and "does not offer per_channel" in done.stdout


# --- what is no law

def test_two_bits_and_three_are_not_nested():
    x = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    few, many = (UniformQuantizer(n, "per_token", 4, scale_dtype=torch.float32) for n in (2, 3))
    assert torch.equal(few.dequantize(few.quantize(x)), x)
    assert (many.dequantize(many.quantize(x)) - x).abs().max() > 0.1


def test_symmetric_grids_are_not_nested():
    x = torch.tensor([[7.0, 1.0, -3.0, 0.0]])
    few, many = (UniformQuantizer(n, "per_token", 4, True, torch.float32) for n in (4, 8))
    assert (few.dequantize(few.quantize(x)) - x).abs().max() < 1e-6
    assert (many.dequantize(many.quantize(x)) - x).abs().max() > 0.01


def test_with_a_float16_grid_idempotence_needs_room():
    """Where a step is finer than the stored minimum can say, quantizing again may move codes: L06 leaves that out."""
    x = 100 + torch.randn(200, 8, generator=torch.Generator().manual_seed(0)) / 100
    uniform = UniformQuantizer(4, "per_token", 8)
    stored = uniform.quantize(x)
    assert not torch.equal(uniform.quantize(uniform.dequantize(stored)).codes(), stored.codes())


# --- its tools

@given(st.sampled_from(FLOATS), st.sampled_from(ALL_KINDS), st.sampled_from([1, 8, 5]), st.data())
def test_tensors_are_what_was_asked_for(dtype, kind, step, data):
    x = data.draw(kv_tensors([dtype], [kind], tokens=step, channels=8, largest=1000.0))
    assert x.dtype == dtype and x.ndim == 4 and x.shape[2] % step == x.shape[3] % 8 == 0 and x.numel()
    assert (x.double().abs() <= 1000).all()


@given(st.floats(-60000, 60000, width=16))
def test_ulp_is_numpys_spacing(value):
    for numpy_type, dtype in ((np.float16, torch.float16), (np.float32, torch.float32), (np.float64, torch.float64)):
        x = torch.tensor([value], dtype=torch.float64)
        assert ulp(x, dtype).item() == np.spacing(np.abs(numpy_type(value)))


def test_memory_is_found_wherever_it_hides():
    class Slots:
        __slots__ = ("kept",)
    one, whole = Slots(), np.zeros(100)
    one.kept = {"view": whole[:2], "list": [torch.zeros(8)[2:3]]}
    assert reachable_nbytes(one) == 800 + 32
    assert reachable_nbytes((one, one), but_not=whole) == 32
