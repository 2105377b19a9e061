"""What the tests share: hypothesis profiles, the door to the law-book, the default model, small models and texts."""

import os

import pytest
import torch
from cli_inputs import SIZES, endless
from gguf_files import tiny_llama
from hypothesis import settings

from kvmini import load_model
from kvmini.laws.door import pytest_addoption, pytest_generate_tests, pytest_report_header  # noqa: F401

settings.register_profile("dev", deadline=None, max_examples=50)
settings.register_profile("ci", deadline=None, max_examples=100, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(scope="session")
def loaded():
    """The default model and its tokenizer, in float64."""
    return load_model(dtype=torch.float64)


@pytest.fixture(scope="session")
def loaded32():
    """The default model and its tokenizer, in float32 as it is used."""
    return load_model()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with models and texts, good and bad."""
    folder = tmp_path_factory.mktemp("cli")
    whole = tiny_llama(**SIZES, tokenizer=endless()).write(folder / "m.gguf").read_bytes()
    tiny_llama(**{**SIZES, "context": 128}).write(folder / "short.gguf")
    tiny_llama(**{**SIZES, "head_dim": 16}).write(folder / "narrow.gguf")
    tiny_llama(**SIZES, architecture="gemma").write(folder / "other.gguf")
    (folder / "cut.gguf").write_bytes(whole[:-5000])
    (folder / "no.gguf").write_text("not a model\n")
    (folder / "text.txt").write_text("Sea salt, sold by the shovel. " * 20, encoding="utf-8")
    (folder / "tiny.txt").write_text("fifteen tokens.", encoding="utf-8")
    (folder / "empty.txt").touch()
    (folder / "blank.txt").write_text(" \n\t\n", encoding="utf-8")
    (folder / "latin.txt").write_bytes("caf\xe9 au lait".encode("latin-1"))
    (folder / "sub").mkdir()
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    """The same folder as the current one."""
    monkeypatch.chdir(folder)
    return folder
