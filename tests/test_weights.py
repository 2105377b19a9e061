"""Checkpoints in: tiny GGUF files written here, a tiny wheel for pip, and no network."""


import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import byte_level, tiny_llama

from kvmini import KvminiError, load_model
from kvmini.rope import Rope


def refusal(path, *hints):
    """The one-line message with which `load_model` refuses a file; it must hold every hint."""
    with pytest.raises(KvminiError) as caught:
        load_model(path)
    message = str(caught.value)
    assert "\n" not in message
    for hint in hints:
        assert str(hint) in message
    return message


def half_split(weight, n_heads):
    """Oracle: row r of a head's first half is GGUF's row 2r, of its second half GGUF's row 2r + 1."""
    D = len(weight) // n_heads
    return np.stack([weight[head * D + (2 * r if r < D // 2 else 2 * r - D + 1)]
                     for head in range(n_heads) for r in range(D)])


# What is read


def test_every_size_comes_from_the_metadata(tmp_path):
    file = tiny_llama(n_layers=3, n_heads=4, n_kv_heads=2, head_dim=8, hidden=20, ffn=28, context=77)
    config = load_model(file.write(tmp_path / "m.gguf"))[0].config
    assert (config.n_layers, config.n_heads, config.n_kv_heads, config.head_dim) == (3, 4, 2, 8)
    assert (config.hidden_size, config.ffn_size, config.context_length) == (20, 28, 77)
    assert config.vocab_size == len(byte_level()["tokenizer.ggml.tokens"])
    assert (config.norm_eps, config.rope, config.tied, config.biases) == (2.0**-10, Rope(8, 1000.0), True, ())


def test_what_the_metadata_may_leave_out(tmp_path):
    file = tiny_llama(n_heads=3, n_kv_heads=3, head_dim=4, hidden=12)
    for name in ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base",
                 "rope.dimension_count"):
        del file.metadata[f"llama.{name}"]
    config = load_model(file.write(tmp_path / "m.gguf"))[0].config
    assert (config.n_kv_heads, config.head_dim, config.rope) == (3, 4, Rope(4, 10000.0))


def test_every_tensor_arrives_in_its_place(tmp_path):
    file = tiny_llama(biases="qkvo", untied=True)
    state = load_model(file.write(tmp_path / "m.gguf"))[0].state_dict()
    places = {"token_embd.weight": "embedding.weight", "output_norm.weight": "norm.weight",
              "output.weight": "head.weight"}
    inside = {"attn_norm": "attention_norm", "ffn_norm": "ffn_norm", "attn_q": "attention.q", "attn_k": "attention.k",
              "attn_v": "attention.v", "attn_output": "attention.o", "ffn_gate": "ffn.gate", "ffn_up": "ffn.up",
              "ffn_down": "ffn.down"}
    for name in file.tensors.keys() - places:
        _, layer, part, last = name.split(".")
        places[name] = f"layers.{layer}.{inside[part]}.{last}"
    assert set(places.values()) == set(state)
    for name, place in places.items():
        n_heads = 4 if "attn_q" in name else 2 if "attn_k" in name else None
        expected = half_split(file.tensors[name], n_heads) if n_heads else file.tensors[name]
        np.testing.assert_array_equal(state[place].numpy(), expected, err_msg=name)


@pytest.mark.parametrize("untied", [False, True])
def test_the_head_is_the_embedding_unless_the_file_has_one(tmp_path, untied):
    model, _ = load_model(tiny_llama(untied=untied).write(tmp_path / "m.gguf"))
    assert model.config.tied is not untied and (model.head is not None) is untied


@pytest.mark.parametrize("biases", ["", "q", "kv", "o", "qkvo"])
def test_biases_that_the_file_has(tmp_path, biases):
    model, _ = load_model(tiny_llama(biases=biases).write(tmp_path / "m.gguf"))
    assert "".join(model.config.biases) == biases
    attention = model.layers[2].attention
    assert [getattr(attention, side).bias is not None for side in "qkvo"] == [side in biases for side in "qkvo"]


@pytest.mark.parametrize(("n_heads", "n_kv_heads", "head_dim"), [(4, 2, 4), (6, 1, 8), (3, 3, 2)])
def test_q_and_k_rows_are_undone_each_with_its_own_head_count(tmp_path, n_heads, n_kv_heads, head_dim):
    """Case 32: rows labelled in half-split order, permuted as llama.cpp's converter does, come back in order."""
    file, hidden = tiny_llama(1, n_heads, n_kv_heads, head_dim, biases="qk"), 20
    for side, heads in (("q", n_heads), ("k", n_kv_heads)):
        rows = np.arange(heads * head_dim, dtype=np.float32)
        permuted = rows.reshape(heads, 2, head_dim // 2).swapaxes(1, 2).reshape(-1)
        file.tensors[f"blk.0.attn_{side}.bias"] = permuted
        file.tensors[f"blk.0.attn_{side}.weight"] = np.repeat(permuted[:, None], hidden, 1)
    attention = load_model(file.write(tmp_path / "m.gguf"))[0].layers[0].attention
    for linear, heads in ((attention.q, n_heads), (attention.k, n_kv_heads)):
        assert linear.bias.tolist() == list(range(heads * head_dim))
        assert linear.weight[:, 7].tolist() == list(range(heads * head_dim))


def numpy_logits(file, ids):
    """Oracle: a Llama straight from the GGUF tensors, with RoPE on neighbouring rows as GGUF has them."""
    w = {name: tensor.astype(np.float64) for name, tensor in file.tensors.items()}
    H, Hkv, D, eps = (file.metadata[f"llama.{name}"] for name in (
        "attention.head_count", "attention.head_count_kv", "attention.key_length",
        "attention.layer_norm_rms_epsilon"))
    frequency = file.metadata["llama.rope.freq_base"] ** (-np.arange(0, D, 2) / D) / w.get("rope_freqs.weight", 1)
    turn = np.exp(1j * np.arange(len(ids))[:, None] * frequency)

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w[f"{name}.weight"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    x = w["token_embd.weight"][ids]
    for layer in (f"blk.{n}." for n in range(file.metadata["llama.block_count"])):
        h = norm(x, layer + "attn_norm")
        q, k, v = (linear(h, f"{layer}attn_{side}").reshape(len(ids), -1, D) for side in "qkv")
        q, k = ((x[..., 0::2] + 1j * x[..., 1::2]) * turn[:, None] for x in (q, k))
        heads = []
        for head in range(H):
            scores = (q[:, head] @ k[:, head * Hkv // H].conj().T).real / D**0.5
            weight = np.tril(np.exp(scores))
            heads.append(weight / weight.sum(-1, keepdims=True) @ v[:, head * Hkv // H])
        x = x + linear(np.concatenate(heads, -1), layer + "attn_output")
        h = norm(x, layer + "ffn_norm")
        gate = linear(h, layer + "ffn_gate")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, layer + "ffn_up"), layer + "ffn_down")
    x = norm(x, "output_norm")
    return x @ w.get("output.weight", w["token_embd.weight"]).T


@pytest.mark.parametrize("options", [{}, {"biases": "qkvo", "untied": True}, {"n_heads": 6, "n_kv_heads": 3},
                                     {"n_heads": 3, "n_kv_heads": 1, "head_dim": 16}])
def test_logits_equal_numpy_on_the_file_as_it_is(tmp_path, options):
    file = tiny_llama(**options)
    file.tensors["rope_freqs.weight"] = np.linspace(1, 3, file.metadata["llama.attention.key_length"] // 2,
                                                    dtype=np.float32)
    model, _ = load_model(file.write(tmp_path / "m.gguf"), dtype=torch.float64)
    ids = list(range(40, 60))
    np.testing.assert_allclose(model(torch.tensor([ids]))[0].numpy(), numpy_logits(file, ids), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_whole_path_runs_in_the_dtype_asked_for(tmp_path, dtype):
    model, _ = load_model(tiny_llama(biases="qkvo", untied=True).write(tmp_path / "m.gguf"), dtype=dtype)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {dtype}
    cache = model.new_cache()
    assert model(torch.tensor([[1, 2, 3]]), cache).dtype == dtype
    assert {side.dtype for side in cache.read(2)} == {dtype}


def test_a_model_is_ready_for_use_not_for_training(tmp_path):
    model, tokenizer = load_model(tiny_llama().write(tmp_path / "m.gguf"))
    assert not model.training and not any(weight.requires_grad for weight in model.parameters())
    assert tokenizer.decode(tokenizer.encode("the hat")) == "the hat"


@pytest.mark.parametrize("alignment", [16, 64])
def test_alignment_is_honoured(tmp_path, alignment):
    """Case 34: tensors of 4, 12, ... bytes; read at the default alignment of 32 each would be its neighbour."""
    file = tiny_llama(n_heads=1, n_kv_heads=1, head_dim=2, hidden=3, ffn=5, alignment=alignment)
    state = load_model(file.write(tmp_path / "m.gguf"))[0].state_dict()
    np.testing.assert_array_equal(state["embedding.weight"].numpy(), file.tensors["token_embd.weight"])
    for n in range(3):
        for name in ("ffn_norm", "ffn.up", "ffn.down"):
            expected = file.tensors[f"blk.{n}.{name.replace('.', '_')}.weight"]
            np.testing.assert_array_equal(state[f"layers.{n}.{name}.weight"].numpy(), expected)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_1],
                         ids=lambda kind: kind.name)
def test_other_formats_equal_gguf_own_dequantization(tmp_path, kind):
    file = tiny_llama(n_layers=1, hidden=32, ffn=64, biases="v")
    expected = {}
    for name in [name for name, tensor in file.tensors.items() if tensor.ndim == 2]:
        data = gguf.quantize(file.tensors[name], kind)
        assert data.nbytes < file.tensors[name].nbytes
        file.tensors[name], expected[name] = (data, kind), gguf.dequantize(data, kind)
    model, _ = load_model(file.write(tmp_path / "m.gguf"))
    for weight, name in ((model.embedding.weight, "token_embd"), (model.layers[0].attention.v.weight, "blk.0.attn_v"),
                         (model.layers[0].ffn.down.weight, "blk.0.ffn_down")):
        np.testing.assert_array_equal(weight.numpy(), expected[f"{name}.weight"])
    np.testing.assert_array_equal(model.layers[0].attention.q.weight.numpy(),
                                  half_split(expected["blk.0.attn_q.weight"], 4))


def test_a_format_that_gguf_cannot_undo_is_named(tmp_path):
    file = tiny_llama()
    file.tensors["output_norm.weight"] = file.tensors["output_norm.weight"].astype(np.int32)
    path = file.write(tmp_path / "m.gguf")
    refusal(path, path, "I32", "output_norm.weight")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rope_freqs_reach_the_rope_in_full(tmp_path, dtype):
    file, factors = tiny_llama(), np.array([1, 1.3, 4.7, 8], np.float32)
    file.tensors["rope_freqs.weight"] = factors
    rope = load_model(file.write(tmp_path / "m.gguf"), dtype=dtype)[0].config.rope
    assert rope == Rope(8, 1000.0, tuple(factors.tolist()))


def test_linear_scaling_reaches_the_rope(tmp_path):
    file = tiny_llama()
    file.metadata |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5}
    assert load_model(file.write(tmp_path / "m.gguf"))[0].config.rope == Rope(8, 1000.0, (2.5,) * 4)


# What is refused


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


# The real one


@pytest.mark.slow
def test_the_default_model_is_what_the_design_says(loaded32):
    config = loaded32[0].config
    assert (config.n_layers, config.n_heads, config.n_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.rope.base, config.tied, config.biases, config.vocab_size) == (100000.0, True, (), 49152)
