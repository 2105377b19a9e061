"""The frontier's options on the command line: a sweep that goes on where it stopped, a calibration saved and given."""

import json

import pytest
from cli_inputs import SETTINGS, refused, run

from kvmini.experiments import run as runs
from kvmini.experiments import sweep
from kvmini.files import read_calibration

CALIBRATED = "k=outliers+nonuniform:2,v=nonuniform:2,sinks=1,pre-rope"


@pytest.fixture
def few(monkeypatch):
    """Thirty-six combinations, of the two axis choices that differ in what a group of 128 can be."""
    monkeypatch.setattr(sweep, "AXIS_CHOICES", (("per_channel", "per_token"), ("per_channel", "per_channel")))
    for name, values in (("BITS", (2, 3)), ("GROUPS", (32, 128)), ("RESIDUALS", (0, 32, 64)), ("SINKS", (4,))):
        monkeypatch.setattr(sweep, name, values)
    return 2 * 3 * 2 + 2 * 3 * 2 * 2  # a group of 128 within a token of 64 channels is none


def lines(path):
    return path.read_text(encoding="utf-8").splitlines()


def test_a_sweep_writes_a_line_for_each_combination_and_goes_on_where_it_stopped(few, here, tmp_path, capsys,
                                                                               monkeypatch):
    path, whole = tmp_path / "s.jsonl", tmp_path / "whole.jsonl"
    assert run(f"frontier --sweep {SETTINGS} --json {whole}") == 0
    assert capsys.readouterr().out == f"{few} combinations in {whole}\n" and len(lines(whole)) == few
    rows = [json.loads(line) for line in lines(whole)]
    assert len({row["name"] for row in rows}) == few and {row["prefill"] for row in rows} == {"streamed"}
    assert {row["n_bits"] for row in rows} == {2, 3} and {row["pre_rope"] for row in rows} == {True, False}
    for row in rows:  # 96 tokens: those in a window, in sinks or in an unfilled group are in no body
        held = min(row["group_size"], 96 - 4 - row["residual_length"])
        if row["key_axis"] == row["value_axis"] and held == row["group_size"]:
            assert row["body_bits_per_element"] == row["n_bits"] + 32 / row["group_size"]

    measure, measured = sweep.perplexity_and_bits, []

    def stops(*args):
        measured.append(args)
        if len(measured) == 8:
            raise KeyboardInterrupt
        return measure(*args)
    monkeypatch.setattr(sweep, "perplexity_and_bits", stops)
    assert run(f"frontier --sweep {SETTINGS} --json {path}") == 130
    assert lines(path) == lines(whole)[:7]
    path.write_text("\n".join(lines(whole)[:9]) + "\n" + lines(whole)[9][:50], encoding="utf-8")  # cut off in a line
    assert run(f"frontier --sweep {SETTINGS} --json {path}") == 0
    assert lines(path) == lines(whole) and len(measured) == 8 + few - 9
    assert run(f"frontier --sweep {SETTINGS} --json {path}") == 0
    assert len(measured) == 8 + few - 9  # nothing was left to measure


def test_the_whole_sweep_is_what_the_issue_of_a_course_needs():
    spelled = list(sweep.combinations(head_dim=64))
    assert len(set(spelled)) == len(spelled) == (3 * 3 + 4) * 3 * 3 * 2 * 2
    assert len(list(sweep.combinations(head_dim=128))) == 4 * 4 * 3 * 3 * 2 * 2


def test_a_sweep_that_cannot_be_is_refused(here, tmp_path, capsys):
    path = tmp_path / "s.jsonl"
    for more, said in ((f"{SETTINGS}", "needs"), (f"{SETTINGS} --json {path} --policy kivi-2", "--policy"),
                       (f"{SETTINGS} --json {path} --n-bits 2", "--n-bits"),
                       (f"{SETTINGS} --json {path} --figure {tmp_path}/f.png", "--figure")):
        assert said in refused(f"frontier --sweep {more}", tmp_path, capsys)


@pytest.mark.parametrize("content", ["[]\n", "{}\n", "no\n", '{"name": "x"}\n', "[1, 2]\n" * 3, "\n"])
def test_a_file_that_is_no_sweep_is_left_alone(content, few, here, tmp_path, capsys):
    path = tmp_path / "s.jsonl"
    path.write_text(content)
    assert "no lines of a sweep" in refused(f"frontier --sweep {SETTINGS} --json {path}", tmp_path, capsys)
    assert path.read_text() == content


def test_another_runs_sweep_is_not_gone_on_from(few, here, tmp_path, capsys):
    path = tmp_path / "s.jsonl"
    assert run(f"frontier --sweep {SETTINGS} --json {path}") == 0
    capsys.readouterr()
    before = path.read_text()
    assert "another run" in refused(f"frontier --sweep {SETTINGS.replace('96', '90')} --json {path}", tmp_path, capsys)
    assert path.read_text() == before


# --- calibrations

def test_a_saved_calibration_is_shown_and_used_instead_of_a_new_one(here, tmp_path, capsys, monkeypatch):
    path = tmp_path / "c.safetensors"
    assert run(f"calibration {SETTINGS} --save {path} --json {tmp_path}/c.json") == 0
    saved, (row,) = read_calibration(path), json.loads((tmp_path / "c.json").read_text())["rows"]
    assert row["largest_key"] == pytest.approx(saved.keys.abs().max().item()) and row["layer"] == 0
    assert "massive activations on the first 0" in capsys.readouterr().out
    line = f"residual {SETTINGS} --policy {CALIBRATED} --json"
    assert run(f"{line} {tmp_path}/made.json") == 0

    def fails(*args):
        raise AssertionError("calibrated again")
    monkeypatch.setattr(runs, "calibrate", fails)
    runs.calibration_of.cache_clear()
    assert run(f"{line} {tmp_path}/given.json --calibration {path}") == 0
    made, given = (json.loads((tmp_path / f"{name}.json").read_text())["rows"][-1] for name in ("made", "given"))
    assert made == given and made["name"] == CALIBRATED


def test_generate_takes_a_calibrated_policy(here, tmp_path, capsys):
    path = tmp_path / "c.safetensors"
    assert run(f"calibration {SETTINGS} --save {path}") == 0
    texts = []
    for more in ("", f"--calibration {path}"):
        capsys.readouterr()
        assert run(f"generate --model m.gguf --quiet --max-new-tokens 8 --policy {CALIBRATED} {more}") == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_a_calibration_that_does_not_fit_is_one_line(here, tmp_path, capsys):
    path = tmp_path / "c.safetensors"
    assert run(f"calibration --model narrow.gguf --tokens 96 --quiet --save {path}") == 0
    capsys.readouterr()
    err = refused(f"residual {SETTINGS} --policy {CALIBRATED} --calibration {path}", tmp_path, capsys)
    assert "c.safetensors" in err and "another model" in err
    (tmp_path / "no.safetensors").write_text("no")
    line = f"residual {SETTINGS} --policy {CALIBRATED} --calibration"
    assert "no calibration" in refused(f"{line} {tmp_path}/no.safetensors", tmp_path, capsys)
    assert "cannot read" in refused(f"{line} {tmp_path}/none.safetensors", tmp_path, capsys)
    assert ".safetensors" in refused(f"calibration {SETTINGS} --save {tmp_path}/c.bin", tmp_path, capsys)


def test_a_model_is_calibrated_once_for_all_policies_and_not_at_all_for_none(here, tmp_path, capsys, monkeypatch):
    calibrate, made = runs.calibrate, []
    monkeypatch.setattr(runs, "calibrate", lambda *args: made.append(args) or calibrate(*args))
    runs.calibration_of.cache_clear()
    assert run(f"residual {SETTINGS} --policy kivi-2") == 0 and not made
    assert run(f"residual {SETTINGS} --policy kivi-2 {CALIBRATED} kvquant-3") == 0 and len(made) == 1
