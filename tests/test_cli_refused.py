"""The command line refuses: one line, exit status 2, nothing left behind."""

import json
import os
import subprocess
import sys

import pytest
from cli_inputs import refused, run

from kvmini import KvminiError
from kvmini.__main__ import arguments, main
from kvmini.files import write_json

# What is refused

NOT_ARGUMENTS = {
    "foo": ["foo", "ablate", "generate", "fetch"],
    "ablate more": ["more"],
    "ablate --foo": ["--foo"],
    "--foo": ["--foo"],
    "fetch --model m.gguf": ["--model"],
    "ablate --policy": ["--policy"],
    "ablate --policy nonsense": ["nonsense", "kivi-2", "exact", "per_channel", "residual"],
    "generate --policy kivi-2 nonsense": ["nonsense", "kivi-2", "exact", "per_channel", "residual"],
    "generate --policy k=per_row:2:32,v=per_token:2:32": ["per_row", "per_channel"],
    "generate --policy k=per_channel:2:32,v=none:make:2:32": ["none:make"],
    "ablate --n-bits 0": ["--n-bits", "1 to 8", "'0'"],
    "ablate --n-bits 9": ["--n-bits", "1 to 8", "'9'"],
    "generate --n-bits two": ["--n-bits", "1 to 8", "'two'"],
    "generate --n-bits 2.0": ["--n-bits", "1 to 8", "'2.0'"],
    "ablate --group-size 0": ["--group-size", "at least 1", "'0'"],
    "ablate --group-size -1": ["--group-size"],
    "ablate --tokens 1": ["--tokens", "at least 2"],
    "ablate --seed -1": ["--seed"],
    "ablate --threads 0": ["--threads", "1 to 1024"],
    "generate --max-new-tokens 0": ["--max-new-tokens", "at least 1"],
    "generate --temperature -1": ["--temperature", "at least 0", "-1"],
    "generate --temperature nan": ["--temperature", "at least 0", "nan"],
    "generate --temperature inf": ["--temperature", "inf"],
    "generate --temperature x": ["--temperature", "at least 0", "'x'"],
    "generate --prompt a --text text.txt": ["--prompt", "--text"],
    "generate --prompt ''": ["prompt", "empty"],
    "generate --seed 99999999999999999999": ["--seed"],
    "generate --threads 99999999999999999999": ["--threads"],
}
NOT_FILES = {
    "--text none.txt": ["none.txt", "No such file"],
    "--text empty.txt": ["empty.txt", "empty"],
    "--text blank.txt": ["blank.txt", "empty"],
    "--text latin.txt": ["latin.txt", "UTF-8", "byte 3", "0xe9"],
    "--text sub": ["sub", "directory"],
    "--text tiny.txt --tokens 96": ["15", "96"],
    "--model none.gguf": ["none.gguf", "No such file"],
    "--model sub": ["sub", "directory"],
    "--model no.gguf": ["no.gguf", "GGUF"],
    "--model cut.gguf": ["cut.gguf", "truncated"],
    "--model other.gguf": ["other.gguf", "gemma", "llama"],
    "--tokens 1025": ["1025", "1024"],
    "--json none/x.json": ["none/x.json", "No such file"],
    "--json sub": ["sub", "folder"],
    f"--json {'x' * 300}.json": ["too long"],
    "--json m.gguf/x.json": ["m.gguf/x.json", "ot a directory"],
}
NOT_FIGURES = {
    "ablate --figure none/x.png": ["none/x.png", "No such file"],
    "ablate --figure sub": ["sub"],
    "ablate --figure x.gif": ["x.gif", ".png", ".svg", ".pdf"],
    "ablate --figure x": [".png", ".svg", ".pdf"],
    "ablate --json x.json --figure none/x.png": ["none/x.png"],
}


@pytest.mark.parametrize(("line", "hints"), [*NOT_ARGUMENTS.items(), *NOT_FIGURES.items()])
def test_arguments_that_are_refused(here, capsys, line, hints):
    if line.startswith(("ablate", "generate")):
        line += " --model m.gguf"
    err = refused(line, here, capsys)
    assert all(hint in err for hint in hints), err


@pytest.mark.parametrize("command", ["ablate", "generate"])
@pytest.mark.parametrize(("line", "hints"), NOT_FILES.items())
def test_files_that_are_refused(here, capsys, command, line, hints):
    err = refused(f"{command} --model m.gguf {line}", here, capsys)  # the last --model counts
    assert all(hint in err for hint in hints), err


@pytest.mark.parametrize("line", [
    "ablate --model narrow.gguf --tokens 96", "ablate --model m.gguf --group-size 48 --tokens 96",
    "ablate --model m.gguf --policy k=per_token:2:48,v=per_token:2:32 --tokens 96"])
def test_a_group_that_does_not_divide_head_dim_leaves_nothing_behind(here, capsys, line):
    err = refused(f"{line} --quiet --json x.json --figure x.png", here, capsys)
    assert "head_dim" in err and "multiple" in err


def test_a_group_that_does_not_divide_head_dim_when_generating(here, capsys):
    assert run("generate --model narrow.gguf --policy t-t-2 --json x.json --quiet") == 2
    assert "head_dim" in capsys.readouterr().err and not (here / "x.json").exists()


@pytest.mark.parametrize("line", ["ablate --tokens 129", f"generate --prompt {'a' * 129}",
                                  "generate --prompt abc --max-new-tokens 126",
                                  "generate --text text.txt --tokens 100 --max-new-tokens 29"])
def test_more_tokens_than_the_model_has_context_for(here, capsys, line):
    err = refused(f"{line} --model short.gguf --json x.json", here, capsys)
    assert "context of 128" in err


def test_the_last_token_that_fits(here, capsys):
    assert run("generate --model short.gguf --prompt abc --max-new-tokens 125 --quiet") == 0


@pytest.mark.parametrize("line", ["--json none/x.json", "--figure none/x.png", "--text none.txt", "--policy none"])
def test_what_can_be_known_is_said_before_the_model_is_loaded(here, capsys, line):
    assert "none.gguf" not in refused(f"ablate --model none.gguf {line}", here, capsys)


def test_a_prompt_that_is_not_unicode(here, capsys):
    """A byte that is not UTF-8 on the command line arrives as a lone surrogate."""
    refused("generate --model m.gguf --prompt caf\udce9", here, capsys)


def test_an_error_while_the_json_file_is_there_keeps_it(here, capsys, tmp_path):
    (tmp_path / "old.json").write_text("old")
    argv = ["ablate", "--model", "narrow.gguf", "--tokens", "96", "--json", str(tmp_path / "old.json")]
    assert main(argv) == 2
    assert (tmp_path / "old.json").read_text() == "old" and os.listdir(tmp_path) == ["old.json"]


def test_a_result_is_replaced_in_one_step(tmp_path):
    """Whoever has the old one open goes on reading the old one."""
    path = tmp_path / "x.json"
    path.write_text("old")
    with open(path) as reader:
        write_json(path, {"new": 1})
        assert reader.read() == "old" and json.loads(path.read_text()) == {"new": 1}


def test_a_result_that_cannot_be_put_in_place_leaves_nothing_behind(tmp_path):
    (tmp_path / "x.json").mkdir()
    with pytest.raises(KvminiError, match=r"x\.json"):
        write_json(tmp_path / "x.json", {})
    assert os.listdir(tmp_path) == ["x.json"] and not os.listdir(tmp_path / "x.json")


def test_a_reader_that_goes_away_is_no_traceback(here, capsys, monkeypatch):
    """As in `python -m kvmini generate | head -c 1`."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        try:
            run("generate --model m.gguf --max-new-tokens 2")
        finally:
            os.dup2(os.open(os.devnull, os.O_WRONLY), write)  # so that closing the file does not fail as well
    assert capsys.readouterr().err == ""


# Help


def test_help_of_the_module():
    run = subprocess.run([sys.executable, "-m", "kvmini", "--help"], capture_output=True, text=True, check=False)
    assert run.returncode == 0 and run.stderr == ""
    assert all(command in run.stdout for command in ("ablate", "generate", "fetch"))


@pytest.mark.parametrize("line", ["--help", "-h", "ablate --help", "generate --help", "fetch --help"])
def test_help(capsys, line):
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    out, err = capsys.readouterr()
    assert (caught.value.code, err) == (0, "") and "usage: " in out


def test_without_a_command_it_is_ablate():
    assert arguments([]) == arguments(["ablate"])
    assert arguments(["--tokens", "7"]) == arguments(["ablate", "--tokens", "7"])
