"""Bytes from a config: parameters to the published totals, caches to the byte, what fits, and the claim's figures."""

import json
from functools import partial

import pytest
import torch
from cache_inputs import HKV, D, cache_policies
from hypothesis import given
from hypothesis import strategies as st

from kvmini import CachePolicy, Config, KvminiError, Llama, QuantizedKVCache, Rope, Side, UniformQuantizer, policies
from kvmini.experiments.memory import CARD, CONTEXTS, findings, memory
from kvmini.memory import (
    GIB,
    Footprint,
    cache_nbytes,
    decode_step_seconds,
    gain_ceiling,
    largest_batch,
    longest_context,
    tokens_per_second,
)
from kvmini.plots.memory import memory as figure
from kvmini.shapes import SHAPES, Shape, shape_of_config, shape_of_model

SMALL = Shape("small", n_layers=2, n_kv_heads=HKV, head_dim=D, n_parameters=1000)
LLAMA = SHAPES["LLaMA-7B"]

# --- weights

@pytest.mark.parametrize(("name", "published"), [
    ("LLaMA-7B", 6_738_415_616), ("Llama-2-7B", 6_738_415_616), ("Llama-2-13B", 13_015_864_320),
    ("Mistral-7B", 7_241_732_096), ("Mixtral-8x7B", 46_702_792_704), ("Falcon-7B", 6_921_720_704),
    ("SmolLM2-135M", 134_515_008)])
def test_parameters_are_the_published_totals(name, published):
    assert SHAPES[name].n_parameters == published


def sizes(model_type, hidden, layers, heads, ffn, vocab, kv_heads=None, **more):
    return {"model_type": model_type, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "ffn_dim" if model_type == "opt" else "intermediate_size": ffn, "vocab_size": vocab,
            **({"num_key_value_heads": kv_heads} if kv_heads else {}), **more}


CONFIGS = {
    "LLaMA-7B": (sizes("llama", 4096, 32, 32, 11008, 32000), 6_738_415_616),
    "Llama-3-8B": (sizes("llama", 4096, 32, 32, 14336, 128256, 8), 8_030_261_248),
    "Llama-3.2-1B": (sizes("llama", 2048, 16, 32, 8192, 128256, 8, head_dim=64, tie_word_embeddings=True),
                     1_235_814_400),
    "Mistral-7B": (sizes("mistral", 4096, 32, 32, 14336, 32000, 8, head_dim=None), 7_241_732_096),
    "Mixtral-8x7B": (sizes("mixtral", 4096, 32, 32, 14336, 32000, 8, num_local_experts=8, num_experts_per_tok=2),
                     46_702_792_704),
    "Qwen2-0.5B": (sizes("qwen2", 896, 24, 14, 4864, 151936, 2, tie_word_embeddings=True), 494_032_768),
    "Qwen2-7B": (sizes("qwen2", 3584, 28, 28, 18944, 152064, 4), 7_615_616_512),
    "opt-125m": (sizes("opt", 768, 12, 12, 3072, 50272, max_position_embeddings=2048), 125_239_296),
    "opt-350m": (sizes("opt", 1024, 24, 16, 4096, 50272, max_position_embeddings=2048, word_embed_proj_dim=512,
                       do_layer_norm_before=False), 331_196_416),
    "OPT-175B": (sizes("opt", 12288, 96, 96, 49152, 50272, max_position_embeddings=2048),
                 SHAPES["OPT-175B"].n_parameters),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gives_the_published_total(name, tmp_path):
    config, published = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config | {"_name_or_path": name}))
    shape = shape_of_config(tmp_path)  # the folder
    assert shape.n_parameters == published
    assert shape == shape_of_config(tmp_path / "config.json")
    assert shape == SHAPES.get(name, shape)


@pytest.mark.parametrize(("change", "says"), [
    ({"model_type": "gemma2"}, "llama, mistral, qwen2, mixtral or opt, not 'gemma2'"),
    ({"model_type": None}, "not None"), ({"hidden_size": None}, "no 'hidden_size'"),
    ({"vocab_size": "32000"}, "'vocab_size' of .* not '32000'"), ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"num_attention_heads": 33}, "33 heads"), ({"num_key_value_heads": 5}, "5 kv heads"),
    ({"model_type": "mixtral"}, "num_local_experts")])
def test_a_bad_config_is_named(change, says, tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(CONFIGS["Llama-3-8B"][0] | change))
    with pytest.raises(KvminiError, match=says) as error:
        shape_of_config(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", "\x00"])
def test_what_is_no_config_is_named(content, tmp_path):
    path = tmp_path / "c.json"
    with pytest.raises(KvminiError, match="cannot read config"):
        shape_of_config(path)
    path.write_text(content)
    with pytest.raises(KvminiError, match=r"c\.json"):
        shape_of_config(path)


@given(st.integers(1, 2), st.integers(1, 3), st.sampled_from([4, 8]), st.integers(1, 40), st.integers(1, 40),
       st.booleans(), st.sampled_from(["", "qkv", "qkvo"]))
def test_a_loaded_model_has_as_many_parameters(n_layers, shared, head_dim, hidden, ffn, tied, biases):
    config = Config(n_layers, 2 * shared, 2, head_dim, hidden, ffn, vocab_size=11, context_length=16, norm_eps=1e-5,
                    rope=Rope(head_dim), tied=tied, biases=tuple(biases))
    shape = shape_of_model(config)
    assert shape.n_parameters == sum(p.numel() for p in Llama(config).parameters())
    assert shape.n_read == shape.n_parameters - (0 if tied else 11 * hidden)
    assert (shape.n_layers, shape.n_kv_heads, shape.head_dim) == (n_layers, 2, head_dim)


def test_idle_experts_are_held_and_not_read():
    mixtral = SHAPES["Mixtral-8x7B"]
    assert mixtral.weight_nbytes(read=True) < 0.3 * mixtral.weight_nbytes()
    assert LLAMA.weight_nbytes(16, read=True) == 2 * (6_738_415_616 - 32000 * 4096)
    assert LLAMA.weight_nbytes(4) == 6_738_415_616 // 2

# --- caches

@given(cache_policies(), st.integers(1, 100), st.integers(1, 3), st.sampled_from([16, 32, 64]))
def test_bytes_are_those_of_a_real_cache(policy, n, batch, width):
    dtype = {16: torch.float16, 32: torch.float32, 64: torch.float64}[width]
    cache = QuantizedKVCache(2, Rope(D), policy)
    for layer in range(2):
        cache.append(layer, *torch.randn(2, batch, HKV, n, D).to(dtype))
    assert cache_nbytes(SMALL, policy, n, batch, width) == cache.nbytes


def test_a_quantizer_of_its_own_for_each_layer():
    side = Side(lambda layer: UniformQuantizer(2 + 2 * layer, "per_channel", 4 + 4 * layer), residual_length=3)
    policy = CachePolicy(side, Side(UniformQuantizer(3, "per_token", 8)), sinks=1)
    cache = QuantizedKVCache(2, Rope(D), policy)
    for layer in range(2):
        cache.append(layer, *torch.randn(2, 1, HKV, 30, D))
    assert cache_nbytes(SMALL, policy, 30, window_bits=32) == cache.nbytes
    assert Footprint(SMALL, policy).period == 8


@given(st.sampled_from(["k=normalized+per_token:3:8,v=per_channel:3:8,symmetric,sinks=3,residual=5",
                        "k=normalized+per_channel:2:48,v=hadamard+per_token:2:8,pre-rope,v-residual=7",
                        "k=e4m3,v=hybrid:per_channel:2:8,sinks=1", "k=exact,v=outliers+per_token:2:8",
                        "x=per_token:2:16,residual=128,sinks=2", "x=per_channel:3:8"]),
       st.integers(1, 300), st.integers(1, 3))
def test_bytes_of_methods_that_wait_and_of_layer_inputs_are_those_of_a_real_cache(spelled, n, batch):
    policy = policies.get(spelled)
    model = Llama(Config(2, 2 * HKV, HKV, D, 32, 64, 100, 512, 1e-5, Rope(D)))
    cache = policy.new_cache(model)
    for layer in range(2):
        k, v = torch.randn(2, batch, HKV, n, D)
        cache.append(layer, k, v, torch.randn(batch, n, 32))
    shape = shape_of_model(model.config)
    assert cache_nbytes(shape, policy, n, batch, 32) == cache.nbytes
    footprint = Footprint(shape, policy, 32)
    assert footprint.peak(n) == max(map(footprint.nbytes, range(n + 1)))


@given(cache_policies(), st.integers(0, 120))
def test_the_peak_is_the_most_on_the_way(policy, n):
    footprint = Footprint(SMALL, policy)
    assert footprint.peak(n) == max(map(footprint.nbytes, range(n + 1)))


@given(st.none() | cache_policies(), st.integers(1, 4), st.integers(0, 40_000), st.integers(1, 200))
def test_one_more_does_not_fit(policy, batch, room, n):
    footprint, budget = Footprint(SMALL, policy), SMALL.weight_nbytes() + room
    longest = longest_context(SMALL, policy, budget, batch)
    assert all(batch * footprint.nbytes(m) <= room for m in range(longest + 1))
    assert batch * footprint.nbytes(longest + 1) > room
    largest = largest_batch(SMALL, policy, budget, n)
    assert largest * footprint.peak(n) <= room < (largest + 1) * footprint.peak(n)


def test_two_bits_at_groups_of_32_are_three():
    assert cache_nbytes(LLAMA, policies.get("c-t-2"), 1024) == 1024 * LLAMA.token_nbytes(bits=3)
    assert LLAMA.token_nbytes() == 512 * 1024 and LLAMA.token_nbytes(2) == 64 * 1024


def test_mistakes_are_named():
    with pytest.raises(KvminiError, match=r"OPT-175B alone take 325\.2 GiB at 16 bits: give more than 80\.0 GiB"):
        largest_batch(SHAPES["OPT-175B"], None, CARD, 512)
    with pytest.raises(KvminiError, match="weights"):
        longest_context(SHAPES["OPT-175B"], None, CARD)
    for call in (partial(cache_nbytes, n_tokens=-1), partial(cache_nbytes, n_tokens=2.5),
                 partial(cache_nbytes, n_tokens=5, batch=0), partial(cache_nbytes, n_tokens=5, window_bits=0),
                 partial(largest_batch, budget_bytes=CARD, n_tokens=0),
                 partial(longest_context, budget_bytes=CARD, batch=0)):
        with pytest.raises(KvminiError, match="must be"):
            call(LLAMA, None)
    with pytest.raises(KvminiError, match="16, 32 or 64"):
        cache_nbytes(LLAMA, policies.get("kivi-2"), 5, window_bits=2)

# --- time, and the claim

def test_a_step_reads_weights_and_cache_once():
    kivi = policies.get("kivi-2")
    read = LLAMA.weight_nbytes(read=True) + 3 * cache_nbytes(LLAMA, kivi, 2048)
    assert decode_step_seconds(LLAMA, kivi, 2048, 3, bandwidth=1e9) == pytest.approx(read / 1e9)
    steps = [decode_step_seconds(LLAMA, kivi, n, 3) for n in (100, 101, 102)]
    assert tokens_per_second(LLAMA, kivi, range(100, 103), 3) == pytest.approx(9 / sum(steps))
    assert gain_ceiling(LLAMA, None, range(100, 103), 3, 3) == 1
    cache_alone = cache_nbytes(LLAMA, None, 2**20) / cache_nbytes(LLAMA, kivi, 2**20)
    assert gain_ceiling(LLAMA, kivi, range(2**20, 2**20 + 1), 10**6, 10**6) == pytest.approx(cache_alone, rel=1e-3)


@pytest.fixture(scope="module")
def result():
    return memory(chosen={"mine": policies.get("k=per_channel:8:32,v=per_token:8:32")})


def test_the_figures_of_the_claim(result):
    claims = {}
    for row in result["article"]:
        claims.setdefault(row["claim"], []).append(row)
    agree = {claim: [row["agrees"] for row in rows] for claim, rows in claims.items()}
    assert [round(row["measured"]) for row in claims["LLaMA-7B, shares of memory"]] == [98, 2, 16, 84]
    assert [claim for claim, agrees in agree.items() if claim.startswith("OPT") and all(agrees)] == [
        "OPT-175B, batch 512, prompt 512 and output 32, in TiB"]  # of four readings
    wide, narrow = (claim for claim in claims if claim.startswith("KIVI"))
    assert "windows of 128" in wide and agree[wide] == [False, False, False, None]
    assert "windows of 32" in narrow and agree[narrow] == [True, True, True, None]
    million = [agrees for claim, agrees in agree.items() if "a million tokens in" in claim]
    assert million == [[True, True], [False, True], [False, False]]  # 2, 2.33, 3 bits; weights of 16 and of 4 bits


def test_rows_fits_and_findings(result):
    assert [row["context"] for row in result["rows"]] == [n for n in CONTEXTS for _ in range(4)]
    for row in result["rows"]:
        assert row["weight_share"] + row["cache_share"] == pytest.approx(100)
        assert row["gain_at_most"] >= 1 and (row["gain_at_most_own_batch"] or 1) >= 1
    exact, *others = result["fits"]
    assert exact["outgrows_weights_at"] == 13_476_831_232 // 524_288 + 1
    assert all(row["longest_context"] > exact["longest_context"] for row in others)
    said = findings(result)
    assert "weights 98% at 512 tokens, 16% at 128K" in said[0] and "2.6 times the batch" in said[0]
    assert "25,706 tokens (exact)" in said[1] and "(mine)" in said[1]
    assert len(said) == 2 + len({row["claim"] for row in result["article"]})
    assert any("98.05 % (said: 98)" in sentence and "4 of 4" in sentence for sentence in said)
    for row in result["article"]:
        row["agrees"] = False
    assert all(". 0 of " in sentence for sentence in findings(result)[2:])


def test_what_does_not_fit_has_no_batch_and_a_figure():
    result = memory(SHAPES["OPT-175B"], batch=512)
    assert all(row["longest_context"] is None and row["largest_batch_512"] is None for row in result["fits"])
    assert all(row["gain_at_most_own_batch"] is None for row in result["rows"])
    shares, sizes, batches = figure(result, "OPT-175B").axes
    assert "not one sequence fits" in batches.texts[0].get_text()
    shares, sizes, batches = figure(memory(budget=24 * GIB), "LLaMA-7B").axes
    assert "24 GiB" in batches.get_title() and len(batches.lines) == 3 and not batches.texts
    assert [text.get_text() for text in sizes.get_legend().get_texts()] == [
        "weights", "budget: 24 GiB", "cache, exact", "cache, kivi-2", "cache, kivi-4"]
    assert [label.get_text() for label in shares.get_xticklabels()] == ["512", "2K", "8K", "32K", "128K", "1M"]
