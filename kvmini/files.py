"""Text in, results out: errors for people, and no file written by halves. Next file: `__main__.py`."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from kvmini.errors import KvminiError

FIGURES = (".png", ".svg", ".pdf")


def read_text(path: Path) -> str:
    """The text of a UTF-8 file; KvminiError where there is none."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise KvminiError(f"cannot read text {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise KvminiError(f"{path} is not UTF-8 text: byte {error.start} is 0x{byte:02x}") from None
    if not text.strip():
        raise KvminiError(f"{path} is empty: it must hold text")
    return text


def check_writable(path: Path | None, formats: tuple[str, ...] = ()) -> None:
    """Raise KvminiError unless a file can be written there: before the long run, not after it."""
    if path is None:
        return
    if formats and path.suffix.lower() not in formats:
        raise KvminiError(f"cannot write {path}: the name must end in one of {', '.join(formats)}")
    try:
        if path.is_dir():
            raise KvminiError(f"cannot write {path}: it is a folder, name a file")
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass
    except OSError as error:
        raise KvminiError(f"cannot write {path}: {error.strerror}") from None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON, whole or not at all."""
    _write_whole(path, lambda part: part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8"))


def write_figure(path: Path, figure: Figure) -> None:
    """Write a figure, whole or not at all; the same figure gives the same file (no date, no random names)."""
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower())
    with rc_context({"svg.hashsalt": "kvmini"}):
        _write_whole(path, lambda part: figure.savefig(part, dpi=150, metadata=undated))


def _write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a neighbour, then rename it: a reader never meets half a file."""
    path = path.resolve()  # a link stays, what it names is replaced
    part = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        if path.exists() and not path.is_file():
            write(path)  # a pipe or a device, which has no halves
        else:
            write(part)
            os.replace(part, path)
    except OSError as error:
        raise KvminiError(f"cannot write {path}: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)
