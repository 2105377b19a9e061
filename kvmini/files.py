"""Text in, results out: errors for people, and no file written by halves. Next file: `prepare.py`."""

import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from safetensors.torch import load_file, save_file

from kvmini.calibration import Calibration
from kvmini.errors import KvminiError
from kvmini.quantizers.base import check_tensor

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


def read_json(path: Path) -> dict[str, Any]:
    """The content of a JSON file that one of our commands wrote; KvminiError where there is none."""
    try:
        content = json.loads(read_text(path))
    except KvminiError:
        raise
    except (ValueError, RecursionError) as error:
        raise KvminiError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise KvminiError(f"{path} was not written by kvmini: it holds no object")
    return content


def read_tensors(path: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries `[B, H, T, D]`, keys and values `[B, Hkv, T, D]` of a .npz or .safetensors file that names them q, k, v.

    Without the batch dimension will do. KvminiError for a file or tensors that do not fit.
    """
    kinds = {".npz": _npz, ".safetensors": load_file}
    if path.suffix not in kinds:
        raise KvminiError(f"cannot read tensors {path}: the name must end in one of {', '.join(kinds)}")
    try:
        tensors = kinds[path.suffix](path)
    except OSError as error:
        raise KvminiError(f"cannot read tensors {path}: {error.strerror or error}") from None
    except Exception as error:  # each library has its own for a file that is not what its name says
        raise KvminiError(f"{path} is not a whole {path.suffix} file: {error}") from None
    if missing := [name for name in "qkv" if name not in tensors]:
        raise KvminiError(f"{path} has no tensor named {' or '.join(missing)}: it must hold q, k and v")
    q, k, v = (x[None] if x.ndim == 3 else x for x in (tensors[name] for name in "qkv"))
    whole = all(x.ndim == 4 and x.is_floating_point() and x.numel() for x in (q, k, v))
    if not whole or k.shape != v.shape or q[:, 0].shape != k[:, 0].shape or q.shape[1] % k.shape[1]:
        shapes = ", ".join(f"{x.dtype} {list(x.shape)}" for x in (q, k, v))
        raise KvminiError(f"{path}: q must be [B, H, T, D], k and v [B, Hkv, T, D] with H a multiple of Hkv, not "
                          f"{shapes}")
    dtype = torch.float64 if torch.float64 in (q.dtype, k.dtype, v.dtype) else torch.float32
    for name, x in zip("qkv", (q, k, v), strict=True):
        try:
            check_tensor(x.to(dtype))
        except KvminiError as error:
            raise KvminiError(f"{path}, {name}: {error}") from None
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _npz(path: Path) -> dict[str, torch.Tensor]:
    with np.load(path) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files if name in ("q", "k", "v")}


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write a calibration as .safetensors, whole or not at all; it can be large (the default one: 120 MB)."""
    tensors = {name: torch.tensor(x) if isinstance(x, int) else x.contiguous()
               for name, x in vars(calibration).items()}
    check_writable(path, (".safetensors",))
    _write_whole(path, lambda part: save_file(tensors, part))


def read_calibration(path: Path) -> Calibration:
    """What `write_calibration` wrote; KvminiError for anything else."""
    try:
        tensors = load_file(path)
        calibration = Calibration(**tensors | {"sinks": int(tensors["sinks"])})
    except OSError as error:
        raise KvminiError(f"cannot read calibration {path}: {error.strerror or error}") from None
    except Exception as error:  # a foreign file fails in safetensors, or in what its tensors are called
        raise KvminiError(f"{path} is no calibration that kvmini wrote: {error}") from None
    return calibration


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
    """Write JSON, whole or not at all; lists of numbers in one line."""
    text = re.sub(r"\[[\s\d.,eE+-]+\]", lambda numbers: " ".join(numbers[0].split()), json.dumps(content, indent=1))
    _write_whole(path, lambda part: part.write_text(text + "\n", encoding="utf-8"))


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
