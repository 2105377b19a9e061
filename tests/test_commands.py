"""Every experiment through the command line, on a tiny model: text, JSON, figures, the same twice."""

import json
import shlex
from dataclasses import replace

import numpy as np
import pytest
import torch
from cli_inputs import SETTINGS, refused, run
from safetensors.torch import save_file

from kvmini import claims
from kvmini.__main__ import main
from kvmini.catalogue import EXPERIMENTS
from kvmini.claims import CLAIMS, verdict
from kvmini.experiments import blind, flips, frontier

KEYS = {"name", "key_axis", "value_axis", "residual_length", "sink_length", "pre_rope", "prefill", "perplexity"}
ADDED = {"residual": {"recall", "counting", "counting_standard_error"}, "sinks": {"output_error", "value_error"},
         "rope": {"key_error", "score_error"}, "blind": {"accuracy", "recall"}, "flips": {"flip_rate", "kept"},
         "frontier": {"recall", "counting", "flip_rate", "step_ratio", "perplexity_ratio"}}


def fewer_items(monkeypatch):
    """Six instructions (the tiny model keeps none, so all would be tried), the six largest batches of choices, and of
    the frontier one recipe a method."""
    whole, items = flips.instructions, blind.choice_items
    monkeypatch.setattr(flips, "instructions", lambda: whole()[:6])
    monkeypatch.setattr(blind, "choice_items", lambda *args: sorted(items(*args), key=len)[-6:])
    few = ("kivi-2", "kvquant-3", "rotatekv-2", "innerq-hybrid", "xquant-2", "fp8-e5m2")
    monkeypatch.setattr(frontier, "SHOWN", few)


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name not in ("ablate", "memory")])
def test_an_experiment_prints_writes_and_draws_the_same_twice(name, here, tmp_path, capsys, monkeypatch):
    fewer_items(monkeypatch)
    monkeypatch.setattr(frontier, "step_seconds", lambda run, cache: 0.125)  # a time alone is never the same twice
    texts = []
    for n in range(2):
        line = f"{name} {SETTINGS} --json {tmp_path}/{n}.json --figure {tmp_path}/{n}.png"
        assert run(line) == 0
        out, err = capsys.readouterr()
        assert err == "" and out.startswith("m.gguf, report.txt, 96 tokens, 2 bits, groups of 32\n")
        texts.append((out, (tmp_path / f"{n}.json").read_text(encoding="utf-8")))
    assert texts[0] == texts[1]
    content = json.loads(texts[0][1])
    assert content["command"] == name and content["rows"]
    assert EXPERIMENTS[name].text(content) in texts[0][0]  # what is printed follows from what is written
    for more in EXPERIMENTS[name].draw:
        first, second = ((tmp_path / f"{n}{more}.png").read_bytes() for n in range(2))
        assert first == second and first.startswith(b"\x89PNG")
    if name in ADDED:
        assert all(KEYS | ADDED[name] <= row.keys() for row in content["rows"])


def test_policies_add_rows_where_they_can_and_are_no_option_elsewhere(here, tmp_path, capsys):
    assert run(f"residual {SETTINGS} --policy kivi-4 --json {tmp_path}/r.json") == 0
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert rows[-1]["name"] == "kivi-4" and len(rows) == 7
    capsys.readouterr()
    assert "--policy" in refused("sinks --policy kivi-2", here, capsys)


def test_memory_needs_no_model(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KVMINI_CACHE", str(tmp_path / "nothing"))
    assert main(["memory", "--policy", "c-t-2", "--json", str(tmp_path / "m.json"), "--quiet"]) == 0
    content = json.loads((tmp_path / "m.json").read_text())
    assert content["config"] == "LLaMA-7B" and {row["name"] for row in content["rows"]} == {
        "exact", "kivi-2", "kivi-4", "c-t-2"}
    assert capsys.readouterr().out.startswith("LLaMA-7B, 16-bit weights, batch 1, 80 GiB, groups of 32\n")
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
              "num_hidden_layers": 3, "intermediate_size": 96, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["memory", "--config", str(tmp_path / "config.json"), "--batch", "4", "--quiet"]) == 0
    assert "batch 4" in capsys.readouterr().out
    assert "none.json" in refused(f"memory --config {tmp_path}/none.json", tmp_path, capsys)
    capsys.readouterr()


# --- errors --tensors

def tensors(tmp_path, name="x.npz", **shapes):
    random = np.random.default_rng(0)
    given = {"q": (4, 40, 16), "k": (2, 40, 16), "v": (2, 40, 16)} | shapes
    arrays = {side: random.normal(size=shape).astype(np.float32) for side, shape in given.items() if shape}
    if "k" in arrays and arrays["k"].shape[-1] == 16:
        arrays["k"][..., 5] += 30  # an outlier channel: it stays where it is only if nothing rotates it
    if name.endswith("npz"):
        np.savez(tmp_path / name, **arrays)
    else:
        save_file({side: torch.tensor(x) for side, x in arrays.items()}, tmp_path / name)
    return tmp_path / name


@pytest.mark.parametrize("name", ["x.npz", "x.safetensors"])
def test_tensors_of_anybody(name, tmp_path, capsys):
    path = tensors(tmp_path, name)
    assert main(shlex.split(f"errors --tensors {path} --group-size 8 --json {tmp_path}/e.json "
                            f"--figure {tmp_path}/e.svg")) == 0
    assert capsys.readouterr().out.startswith(f"{name}, 40 tokens, 2 bits, groups of 8\n")
    content = json.loads((tmp_path / "e.json").read_text())
    token, channel = content["rows"]
    assert token["key_error"] > 1.3 * channel["key_error"]
    assert [row["largest_channel"] for row in content["heads"]] == [5, 5]
    before, after = content["channels"]
    assert before | {"name": after["name"]} == after  # nothing was rotated
    assert main(shlex.split(f"errors --tensors {path} --group-size 8 --rope-base 100 --json {tmp_path}/e.json")) == 0
    before, after = json.loads((tmp_path / "e.json").read_text())["channels"]
    assert after["persistence"] != before["persistence"]  # now they were


@pytest.mark.parametrize(("shapes", "said"), [
    ({"v": None}, ["no tensor named v"]), ({"k": (3, 40, 16), "v": (3, 40, 16)}, ["H a multiple of Hkv"]),
    ({"q": (4, 39, 16)}, ["[1, 4, 39, 16]"]), ({"v": (2, 40, 8)}, ["[1, 2, 40, 8]"]), ({"q": (40, 16)}, ["[40, 16]"])])
def test_tensors_that_do_not_fit_are_refused(shapes, said, tmp_path, capsys):
    path = tensors(tmp_path, **shapes)
    err = refused(f"errors --tensors {path}", tmp_path, capsys)
    assert all(word in err for word in said)


def test_files_that_are_no_tensors_are_refused(tmp_path, capsys):
    (tmp_path / "a.npz").write_text("no")
    (tmp_path / "a.safetensors").write_text("no")
    (tmp_path / "a.csv").write_text("no")
    path = tensors(tmp_path)
    for line, said in (("a.npz", "not a whole .npz"), ("a.safetensors", "not a whole .safetensors"), ("a.csv", ".npz"),
                       ("b.npz", "No such file"), ("x.npz --tokens 9", "--tokens"), ("x.npz --group-size 7", "7")):
        assert said in refused(f"errors --tensors {tmp_path}/{line}", tmp_path, capsys)
    assert "--rope-base" in refused("errors --rope-base 100", tmp_path, capsys)
    assert path.exists()


# --- claims

def test_claims_print_rows_and_resume_where_they_stopped(here, tmp_path, capsys, monkeypatch):
    fewer_items(monkeypatch)
    line = f"claims {SETTINGS} --only 3 6 11 14 --json {tmp_path}/c.json --figure {tmp_path}/c.png"
    assert run(line) == 0
    out, content = capsys.readouterr().out, json.loads((tmp_path / "c.json").read_text())
    assert [row["number"] for row in content["rows"]] == [3, 6, 11, *[14] * 5]
    assert claims.text(content["rows"]) in out and content["rows"][-1]["agrees"] == "not measured"
    assert {path.name for path in tmp_path.glob("*.png")} == {
        f"c-{name}.png" for name in ("errors", "errors-channels", "errors-sparsity", "frontier", "groups", "timeline")}
    before = (tmp_path / "c.json").read_bytes()

    def fails(run):
        raise AssertionError("measured again")
    for name in ("groups", "errors"):
        monkeypatch.setitem(EXPERIMENTS, name, replace(EXPERIMENTS[name], measure=fails))
    assert run(f"{line} --resume") == 0
    assert (tmp_path / "c.json").read_bytes() == before
    capsys.readouterr()
    assert "another run" in refused(f"{line} --resume --seed 5", tmp_path, capsys)
    assert "--json" in refused(f"claims {SETTINGS} --resume", tmp_path, capsys)
    assert "1 to 16" in refused("claims --only 17", tmp_path, capsys)


def test_an_interrupted_run_keeps_what_it_has(here, tmp_path, capsys, monkeypatch):
    def fails(run):
        raise KeyboardInterrupt
    monkeypatch.setitem(EXPERIMENTS, "timeline", replace(EXPERIMENTS["timeline"], measure=fails))
    assert run(f"claims {SETTINGS} --only 3 11 --json {tmp_path}/c.json") == 130
    content = json.loads((tmp_path / "c.json").read_text())
    assert list(content["results"]) == ["groups"] and content["rows"] == []


def test_the_claims_are_numbered_and_every_experiment_has_one():
    numbers = [claim.number for claim in CLAIMS]
    assert numbers == sorted(numbers) and set(numbers) == set(range(1, 17))
    ours = {"reach", "calibration"}  # policies found here, and what methods are told: nothing that the article says
    assert {claim.experiment for claim in CLAIMS} == set(EXPERIMENTS) - ours
    assert verdict(True) == "yes" and verdict(False, False) == "no" and verdict(False, True) == "in part"


# --- what reviewers and small machines will try

FAST = [name for name in EXPERIMENTS if name not in ("ablate", "memory", "blind", "flips", "residual")]


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("settings", ["--tokens 2", "--tokens 31", "--tokens 33", "--tokens 70 --group-size 64",
                                      "--tokens 40 --group-size 1", "--tokens 64 --n-bits 1", "--tokens 64 --n-bits 8"])
def test_any_size_gives_figures_or_one_line(name, settings, here, tmp_path, capsys, monkeypatch):
    fewer_items(monkeypatch)
    status = run(f"{name} --model m.gguf --quiet {settings} --json {tmp_path}/x.json")
    out, err = capsys.readouterr()
    if status == 2:
        assert out == "" and err.startswith("kvmini: ") and err.count("\n") == 1 and not list(tmp_path.iterdir())
    else:
        assert status == 0 and err == ""
        text = (tmp_path / "x.json").read_text(encoding="utf-8")
        assert "NaN" not in text and "Infinity" not in text and "nan" not in out and "inf" not in out.split()


@pytest.mark.parametrize("settings", ["--tokens 31", "--tokens 64 --group-size 64"])
def test_claims_that_cannot_be_judged_say_so(settings, here, tmp_path, capsys):
    assert run(f"claims --model m.gguf --quiet {settings} --only 3 8 9 --json {tmp_path}/c.json") == 0
    rows = {row["number"]: row for row in json.loads((tmp_path / "c.json").read_text())["rows"]}
    assert rows[3]["agrees"] == "not measured" and rows[8]["agrees"] == "no"  # a random model has no massive activation
    assert rows[9]["agrees"] == "not measured"


@pytest.mark.parametrize("content", ["[]", "null", "{}", '{"command": "claims"}', "no", "[" * 100_000])
def test_a_file_to_resume_from_that_is_none_is_refused(content, here, tmp_path, capsys):
    (tmp_path / "c.json").write_text(content)
    refused(f"claims {SETTINGS} --only 3 --resume --json {tmp_path}/c.json", tmp_path, capsys)


@pytest.mark.parametrize("results", [None, [], {"memory": {}}, {"memory": "x"}, {"nothing": {"rows": []}}])
def test_damaged_results_are_not_gone_on_from(results, here, tmp_path, capsys):
    assert run(f"claims {SETTINGS} --only 3 --json {tmp_path}/c.json") == 0
    capsys.readouterr()
    content = json.loads((tmp_path / "c.json").read_text())
    (tmp_path / "c.json").write_text(json.dumps(content | {"results": results}))
    assert "damaged" in refused(f"claims {SETTINGS} --only 3 --resume --json {tmp_path}/c.json", tmp_path, capsys)


def test_another_text_of_the_same_name_is_another_run(here, tmp_path, capsys):
    text = tmp_path / "t.txt"
    line = f"claims --model m.gguf --quiet --tokens 64 --only 3 --text {text} --json {tmp_path}/c.json"
    text.write_text("Sea salt, sold by the shovel. " * 9, encoding="utf-8")
    assert run(line) == 0
    capsys.readouterr()
    text.write_text("Sea shells, sold by the shore. " * 9, encoding="utf-8")
    assert "another run" in refused(f"{line} --resume", tmp_path, capsys)


def test_not_a_number_in_a_users_tensors_is_named(tmp_path, capsys):
    path = tensors(tmp_path)
    arrays = dict(np.load(path))
    for side in "qkv":
        bad = {name: x.copy() for name, x in arrays.items()}
        bad[side][1, 2, 3] = np.nan
        np.savez(path, **bad)
        err = refused(f"errors --tensors {path} --group-size 8", tmp_path, capsys)
        assert f"{path}, {side}: " in err and "[0, 1, 2, 3]" in err


def test_heads_of_any_width_and_further_arrays_will_do(tmp_path, capsys):
    for D in (2, 5):
        arrays = {name: np.random.default_rng(0).normal(size=(2, 30, D)).astype(np.float16) for name in "qkv"}
        np.savez(tmp_path / "x.npz", names=np.array(["a", "b"]), **arrays)
        assert main(["errors", "--tensors", str(tmp_path / "x.npz"), "--group-size", str(D)]) == 0
        assert f"groups of {D}" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["--budget 1e308", "--weight-bits 1e308", "--weight-bits 0", "--n-bits 3",
                                  "--batch 0"])
def test_memory_refuses_what_no_machine_has(line, tmp_path, capsys):
    refused(f"memory {line}", tmp_path, capsys)


@pytest.mark.parametrize(("head_dim", "group"), [(80, 16), (100, 4), (128, 32)])
def test_memory_takes_heads_that_32_does_not_divide(head_dim, group, tmp_path, capsys):
    config = {"model_type": "llama", "hidden_size": 4 * head_dim, "num_attention_heads": 4, "num_key_value_heads": 4,
              "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["memory", "--config", str(tmp_path / "config.json"), "--quiet"]) == 0
    assert f"groups of {group}\n" in capsys.readouterr().out
