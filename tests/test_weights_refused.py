"""Checkpoints that are refused: one line that names the file and what is wrong with it."""


import numpy as np
import pytest
from gguf_files import tiny_llama

from kvmini import KvminiError, load_model


def refusal(path, *hints):
    """The one-line message with which `load_model` refuses a file; it must hold every hint."""
    with pytest.raises(KvminiError) as caught:
        load_model(path)
    message = str(caught.value)
    assert "\n" not in message
    for hint in hints:
        assert str(hint) in message
    return message


@pytest.mark.parametrize("changes", [
    {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, {"llama.rope.scaling.type": "longrope"},
    {"llama.rope.scaling.type": "linear"}, {"llama.rope.dimension_count": 4}, {"llama.attention.value_length": 4}])
def test_rotations_and_heads_that_are_not_supported(tmp_path, changes):
    file = tiny_llama()
    file.metadata |= changes
    refusal(file.write(tmp_path / "m.gguf"), "RoPE" if len(changes) == 2 else "")


def test_a_missing_file(tmp_path):
    refusal(tmp_path / "none.gguf", tmp_path / "none.gguf", "No such file")


def test_a_folder(tmp_path):
    refusal(tmp_path, tmp_path, "directory")


@pytest.mark.parametrize("content", [b"", b"GG", b"Once upon a time there was a text.\n", b"\x80\x02}q\x00."])
def test_something_that_is_not_gguf(tmp_path, content):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    refusal(path, path, "not a GGUF file")


def test_a_file_cut_anywhere(tmp_path):
    file = tiny_llama(n_layers=1, n_heads=1, n_kv_heads=1, head_dim=2, hidden=3, ffn=2)
    kept = slice(ord("a"), ord("a") + 3)  # a vocabulary of three tokens keeps the file small
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"):
        file.metadata[key] = file.metadata[key][kept]
    file.metadata["tokenizer.ggml.merges"] = ["a b"]
    file.metadata["tokenizer.ggml.tokens"][2] = "ab"
    file.metadata["tokenizer.ggml.eos_token_id"] = 0
    file.tensors["token_embd.weight"] = file.tensors["token_embd.weight"][:3]
    whole = file.write(tmp_path / "whole.gguf").read_bytes()
    load_model(tmp_path / "whole.gguf")
    last = len(whole) - (-file.tensors["blk.0.ffn_down.weight"].nbytes) % 32  # behind it is padding alone
    path = tmp_path / "cut.gguf"
    for length in [*range(4, 100), *range(100, last, 11), last - 1]:
        path.write_bytes(whole[:length])
        refusal(path, path, "truncated")


@pytest.mark.parametrize("damage", ["text", "version", "count"])
def test_a_damaged_file(tmp_path, damage):
    path = tiny_llama().write(tmp_path / "m.gguf")
    content = bytearray(path.read_bytes())
    at = {"text": content.index(b"smollm"), "version": 4, "count": 8}[damage]
    content[at] = 0xFF
    path.write_bytes(content)
    refusal(path, path)


def test_big_endian_is_not_read_as_little_endian(tmp_path):
    """Refused, or read right: swapped numbers without an error would be the worst."""
    file = tiny_llama()
    path = file.write(tmp_path / "m.gguf", big_endian=True)
    try:
        weight = load_model(path)[0].embedding.weight
    except KvminiError as error:
        assert str(path) in str(error)
    else:
        np.testing.assert_array_equal(weight.numpy(), file.tensors["token_embd.weight"])


def test_another_architecture(tmp_path):
    path = tiny_llama(architecture="gemma").write(tmp_path / "m.gguf")
    refusal(path, path, "gemma", "llama")


@pytest.mark.parametrize("key", ["llama.block_count", "llama.attention.head_count", "llama.embedding_length",
                                 "llama.feed_forward_length", "llama.context_length",
                                 "llama.attention.layer_norm_rms_epsilon", "tokenizer.ggml.model",
                                 "tokenizer.ggml.tokens", "tokenizer.ggml.merges"])
def test_a_missing_metadata_key(tmp_path, key):
    file = tiny_llama()
    del file.metadata[key]
    refusal(file.write(tmp_path / "m.gguf"), key)


@pytest.mark.parametrize("name", sorted(tiny_llama(n_layers=1).tensors))
def test_a_missing_tensor(tmp_path, name):
    file = tiny_llama(n_layers=1)
    del file.tensors[name]
    known_by_name = ("token_embd.weight", "blk.0.attn_q.weight")
    refusal(file.write(tmp_path / "m.gguf"), name if name in known_by_name else "Missing key")


def test_tensors_of_a_mixture_of_experts(tmp_path):
    file = tiny_llama()
    file.tensors["blk.0.ffn_gate_exps.weight"] = np.zeros((2, 28, 20), np.float32)
    path = file.write(tmp_path / "m.gguf")
    refusal(path, path, "ffn_gate_exps")


@pytest.mark.parametrize("name", ["attention.head_count_kv", "feed_forward_length"])
def test_a_size_that_differs_between_layers(tmp_path, name):
    file = tiny_llama()
    file.metadata[f"llama.{name}"] = [2, 2, 1]
    refusal(file.write(tmp_path / "m.gguf"), name, "[2, 2, 1]")


@pytest.mark.parametrize("changes", [{"attention.head_count": 5}, {"attention.head_count": 3, "embedding_length": 21},
                                     {"attention.head_count_kv": 3}, {"attention.head_count_kv": 0},
                                     {"attention.head_count": 0}, {"embedding_length": 10}, {"block_count": 4},
                                     dict.fromkeys(("attention.key_length", "attention.value_length",
                                                    "rope.dimension_count"), 7)])
def test_sizes_that_the_tensors_do_not_have(tmp_path, changes):
    file = tiny_llama()
    file.metadata |= {f"llama.{name}": value for name, value in changes.items()}
    refusal(file.write(tmp_path / "m.gguf"))


@pytest.mark.parametrize(("name", "value"), [
    ("rope.freq_base", 0.0), ("rope.freq_base", "x"), ("attention.layer_norm_rms_epsilon", "a"), ("context_length", 0),
    ("attention.layer_norm_rms_epsilon", float("nan")), ("rope.freq_base", float("inf")), ("block_count", 2**31)])
def test_sizes_that_are_no_sizes(tmp_path, name, value):
    file = tiny_llama()
    file.metadata[f"llama.{name}"] = value
    path = file.write(tmp_path / "m.gguf")
    refusal(path, path, name)


def test_a_projection_of_another_size(tmp_path):
    file = tiny_llama()
    file.tensors["blk.1.attn_q.weight"] = file.tensors["blk.1.attn_q.weight"][:30]
    refusal(file.write(tmp_path / "m.gguf"))


def test_a_format_that_gguf_cannot_undo_is_named(tmp_path):
    file = tiny_llama()
    file.tensors["output_norm.weight"] = file.tensors["output_norm.weight"].astype(np.int32)
    path = file.write(tmp_path / "m.gguf")
    refusal(path, path, "I32", "output_norm.weight")
