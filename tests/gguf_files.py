"""Tiny Llama-shaped GGUF files for the tests: random weights, written with the gguf package's own writer.

`tiny_llama(...)` gives a `Gguf` whose `metadata` and `tensors` are plain dicts under their GGUF names: change
them, then `write` the file. Rows of q and k are in GGUF's interleaved order, as everything here is.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFEndian, GGUFWriter

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # GGUF's token types
END = "<|endoftext|>"


@dataclass
class Gguf:
    """A GGUF file to be. A tensor is an array, or a pair (bytes, type) of one that is already block-quantized."""

    architecture: str
    metadata: dict[str, Any]
    tensors: dict[str, np.ndarray | tuple[np.ndarray, GGMLQuantizationType]]
    alignment: int | None = None

    def write(self, path: Path, big_endian: bool = False) -> Path:
        endian = GGUFEndian.BIG if big_endian else GGUFEndian.LITTLE
        writer = GGUFWriter(path, self.architecture, endianess=endian)
        if self.alignment:
            writer.add_custom_alignment(self.alignment)
        for key, value in self.metadata.items():
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
                   list: writer.add_array}[type(value)]
            add(key, value)
        for name, tensor in self.tensors.items():
            data, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def tiny_llama(n_layers: int = 3, n_heads: int = 4, n_kv_heads: int = 2, head_dim: int = 8, hidden: int = 20,
               ffn: int = 28, context: int = 64, biases: str = "", untied: bool = False,
               tokenizer: dict[str, Any] | None = None, architecture: str = "llama", alignment: int | None = None,
               seed: int = 0) -> Gguf:
    """A small Llama with random weights; `biases` names the projections (of q, k, v, o) that have one."""
    tokenizer = byte_level() if tokenizer is None else tokenizer
    random = np.random.default_rng(seed)
    vocab, q_size, kv_size = len(tokenizer["tokenizer.ggml.tokens"]), n_heads * head_dim, n_kv_heads * head_dim

    def matrix(rows: int, columns: int) -> np.ndarray:
        return random.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)

    def vector(size: int, mean: float) -> np.ndarray:
        return random.normal(mean, 0.1, size).astype(np.float32)

    tensors = {"token_embd.weight": matrix(vocab, hidden), "output_norm.weight": vector(hidden, 1)}
    if untied:
        tensors["output.weight"] = matrix(vocab, hidden)
    for layer in (f"blk.{n}." for n in range(n_layers)):
        shapes = {"q": (q_size, hidden), "k": (kv_size, hidden), "v": (kv_size, hidden), "o": (hidden, q_size)}
        for side, shape in shapes.items():
            name = layer + ("attn_output" if side == "o" else f"attn_{side}")
            tensors[f"{name}.weight"] = matrix(*shape)
            if side in biases:
                tensors[f"{name}.bias"] = vector(shape[0], 0)
        tensors |= {f"{layer}attn_norm.weight": vector(hidden, 1), f"{layer}ffn_norm.weight": vector(hidden, 1),
                    f"{layer}ffn_gate.weight": matrix(ffn, hidden), f"{layer}ffn_up.weight": matrix(ffn, hidden),
                    f"{layer}ffn_down.weight": matrix(hidden, ffn)}
    sizes = {"block_count": n_layers, "attention.head_count": n_heads, "attention.head_count_kv": n_kv_heads,
             "attention.key_length": head_dim, "attention.value_length": head_dim, "embedding_length": hidden,
             "feed_forward_length": ffn, "context_length": context, "rope.freq_base": 1000.0,
             "rope.dimension_count": head_dim, "attention.layer_norm_rms_epsilon": 2.0**-10}
    metadata = {f"{architecture}.{name}": value for name, value in sizes.items()} | tokenizer
    return Gguf(architecture, metadata, tensors, alignment)


def byte_level(pre: str = "smollm", merges: tuple[str, ...] = ("t h", "th e"),
               control: tuple[str, ...] = (END,)) -> dict[str, Any]:
    """Metadata of a byte-level BPE tokenizer: ids 0 .. 255 are the bytes, then merges, then control tokens."""
    tokens = [*byte_characters(), *(merge.replace(" ", "") for merge in merges)]
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": list(merges),
            "tokenizer.ggml.tokens": [*tokens, *control],
            "tokenizer.ggml.token_type": [NORMAL] * len(tokens) + [CONTROL] * len(control),
            "tokenizer.ggml.eos_token_id": len(tokens)}


def byte_characters() -> list[str]:
    """GPT-2's printable stand-ins of the bytes 0 .. 255: a byte that prints is itself, the others follow 255."""
    prints = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in prints]
    return [chr(byte) if byte in prints else chr(256 + others.index(byte)) for byte in range(256)]


def sentencepiece(scores: dict[str, float], space_prefix: bool = True) -> dict[str, Any]:
    """Metadata of a SentencePiece tokenizer: <unk>, <s>, </s>, the 256 byte tokens, then the scored pieces."""
    special, bytes_ = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [*special, *bytes_, *scores],
            "tokenizer.ggml.scores": [0.0] * (len(special) + len(bytes_)) + list(scores.values()),
            "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(scores),
            "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.add_space_prefix": space_prefix}


def always_saying(file: Gguf, token: int) -> Gguf:
    """The untied model changed so that `token` is the likeliest next one, whatever came before."""
    for name, tensor in file.tensors.items():
        tensor[:] = 1 if name.endswith("_norm.weight") or name == "token_embd.weight" else 0
    file.tensors["output.weight"][token] = 1
    return file
