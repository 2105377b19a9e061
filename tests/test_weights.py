"""Checkpoints in: tiny GGUF files written here, and what is read from them."""


import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import byte_level, tiny_llama

from kvmini import load_model
from kvmini.rope import Rope


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


# The real one


@pytest.mark.slow
def test_the_default_model_is_what_the_design_says(loaded32):
    config = loaded32[0].config
    assert (config.n_layers, config.n_heads, config.n_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.rope.base, config.tied, config.biases, config.vocab_size) == (100000.0, True, (), 49152)
