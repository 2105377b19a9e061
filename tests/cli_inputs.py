"""What the tests of the command line share: tiny models, texts good and bad, and how to run a line."""

import shlex

from gguf_files import byte_level

from kvmini.__main__ import main

SIZES = {"n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "head_dim": 64, "hidden": 64, "ffn": 48, "context": 1024}
SETTINGS = "--model m.gguf --tokens 96 --quiet"


def endless(**metadata):
    """A byte-level tokenizer whose generation never meets a stop token, unless `metadata` has one."""
    tokenizer = byte_level() | metadata
    if not metadata:
        del tokenizer["tokenizer.ggml.eos_token_id"]
    return tokenizer


def run(line):
    return main(shlex.split(line))


def snapshot(folder):
    return {path.relative_to(folder): path.stat().st_mtime_ns for path in folder.rglob("*")}


def refused(line, folder, capsys):
    """The one line of a run that fails as it should; it must leave nothing behind."""
    before = snapshot(folder)
    status = run(line)
    out, err = capsys.readouterr()
    assert (status, out) == (2, ""), err
    assert err.startswith("kvmini: ") and err.endswith("\n") and err.count("\n") == 1
    assert snapshot(folder) == before
    return err
