"""Errors, perplexity and recall: the formulas, on small tensors and a small random model."""

import numpy as np
import pytest
import torch
from test_model import small

from kvmini import KVCache, KvminiError, QuantizedKVCache, Rope, UniformQuantizer, metrics, policies
from kvmini.evaluate import log_losses, perplexity
from kvmini.metrics import (
    ERRORS,
    Tap,
    consumed_error,
    elementwise,
    errors,
    frobenius,
    head_errors,
    layer_errors,
    relative_error,
)

D, HKV, H, T = 16, 2, 4, 44


def tensors(seed=0):
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, heads, T, D, generator=random, dtype=torch.float64) for heads in (H, HKV, HKV))
    k[..., 5] *= 15
    v[..., 0, :] /= 20
    return q, k, v


def by_hand(q, k, v, policy):
    """The four errors by rule: decode token by token, and look at what each query sees."""
    rope, cache = Rope(D), QuantizedKVCache(1, Rope(D), policy)
    q, k_exact = rope.apply(q, range(T)).numpy(), rope.apply(k, range(T)).numpy()
    weights, weights_hat = np.zeros((2, H, T, T))
    out, out_hat = np.zeros((2, H, T, D))
    for i in range(T):
        keys, values = cache.append(0, k[..., i:i + 1, :], v[..., i:i + 1, :])
        for head in range(H):
            for w, seen in ((weights, k_exact[0, head // 2, :i + 1]), (weights_hat, keys.tokens[0, head // 2].numpy())):
                score = np.exp(seen @ q[0, head, i] / np.sqrt(D))
                w[head, i, :i + 1] = score / score.sum()
            out[head, i] = weights[head, i, :i + 1] @ v[0, head // 2, :i + 1].numpy()
            out_hat[head, i] = weights[head, i, :i + 1] @ values.tokens[0, head // 2].numpy()
    k_hat, v_hat = (x.numpy() for x in cache.read(0))

    def error(x, x_hat):
        return 100 * np.mean([np.linalg.norm(a - b) / np.linalg.norm(a) for a, b in zip(x, x_hat, strict=True)])
    pairs = (k_exact[0], k_hat[0]), (weights, weights_hat), (v[0].numpy(), v_hat[0]), (out, out_hat)
    return [error(*pair) for pair in pairs]


@pytest.mark.parametrize("spelling", [
    "k=per_channel:2:8,v=per_token:2:8", "k=per_token:3:8,v=per_channel:2:8,residual=8,sinks=2",
    "k=per_channel:2:8,v=per_token:2:8,residual=16,sinks=1,pre-rope"])
def test_errors_are_those_of_a_token_by_token_decode(spelling):
    q, k, v = tensors()
    got = layer_errors(0, q, k, v, [QuantizedKVCache(1, Rope(D), policies.get(spelling + ",prefill=streamed"))])
    np.testing.assert_allclose(got[0], by_hand(q, k, v, policies.get(spelling)), rtol=1e-9)


def test_errors_do_not_depend_on_how_the_queries_are_cut(monkeypatch):
    q, k, v = tensors()
    policy = policies.get("k=per_channel:2:8,v=per_token:2:8,residual=8,prefill=streamed")
    whole = layer_errors(0, q, k, v, [QuantizedKVCache(1, Rope(D), policy)])
    monkeypatch.setattr(metrics, "CHUNK", 7)
    torch.testing.assert_close(layer_errors(0, q, k, v, [QuantizedKVCache(1, Rope(D), policy)]), whole)


def test_the_stored_error_is_of_the_final_cache_whatever_the_call_saw():
    q, k, v = tensors()
    spelling = "k=per_channel:2:8,v=per_token:2:8,residual=16,prefill="
    streamed, seen_all = layer_errors(0, q, k, v, [QuantizedKVCache(1, Rope(D), policies.get(spelling + mode))
                                                   for mode in ("streamed", "all")])
    assert streamed[0] == seen_all[0] and streamed[2] == seen_all[2] and streamed[3] < seen_all[3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_norms_neither_overflow_nor_vanish_in_a_narrow_type(dtype):
    for x, x_hat, percent in ((300.0, 600.0, 100.0), (1e-4, 2e-4, 100.0), (256.0, 288.0, 12.5)):
        got = relative_error(torch.full((2, 2), x, dtype=dtype), torch.full((2, 2), x_hat, dtype=dtype))
        assert got.item() == pytest.approx(percent, rel=0.01)
    q, k, v = (x.to(dtype) for x in tensors())
    k[..., 3] *= 300
    spelled = policies.get("k=per_channel:2:8,v=per_token:2:8,prefill=all")
    got = layer_errors(0, q, k, v, [QuantizedKVCache(1, Rope(D), spelled)])
    wide = layer_errors(0, q.double(), k.double(), v.double(), [QuantizedKVCache(1, Rope(D), spelled)])
    torch.testing.assert_close(got[:, [0, 2, 3]], wide[:, [0, 2, 3]], rtol=0.05, atol=0.5)


def test_an_exact_cache_makes_no_error_and_a_used_one_is_refused():
    q, k, v = tensors()
    cache = KVCache(1, Rope(D))
    assert layer_errors(0, q, k, v, [cache]).tolist() == [[0.0] * 4]
    with pytest.raises(KvminiError, match="empty"):
        layer_errors(0, q, k, v, [cache])


def test_relative_error_is_one_norm_per_head():
    x = torch.stack([torch.full((2, 2), 1.0), torch.full((2, 2), 100.0), torch.zeros(2, 2)])
    off = x + torch.tensor([0.5, 1.0, 0.0])[:, None, None]
    torch.testing.assert_close(relative_error(x, off), torch.tensor([50.0, 1.0, 0.0], dtype=torch.float64))


def test_elementwise_is_the_root_mean_square_of_ratios_with_a_floor_by_row():
    x = torch.tensor([[3.0, 4.0, 0.0], [0.001, 100.0, 0.0]])
    x_hat = torch.tensor([[3.3, 4.0, 9.0], [0.101, 90.0, 1.0]])
    ratios = [0.3 / 3, 0, 0.1 / 1.0, 10 / 100]  # the floor of the second row: 1% of its norm, 100; zeros are left out
    total, n = elementwise(x, x_hat)
    assert n.item() == 4
    assert total.item() == pytest.approx(sum(ratio**2 for ratio in ratios), rel=1e-4)


@pytest.mark.parametrize("measure", [frobenius, elementwise])
def test_head_errors_are_those_of_each_head_alone(measure):
    """Cut the tensors to one key/value head and its query heads: the same figures, and their mean is the layer's."""
    q, k, v = tensors()
    policy = policies.get("k=per_channel:2:8,v=per_token:2:8,prefill=all")
    (whole,) = head_errors(0, q, k, v, [QuantizedKVCache(1, Rope(D), policy)], measure)
    assert whole.shape == (4, HKV)
    for head in range(HKV):
        one = slice(head, head + 1)
        (alone,) = head_errors(0, q[:, 2 * head:2 * head + 2], k[:, one], v[:, one],
                               [QuantizedKVCache(1, Rope(D), policy)], measure)
        torch.testing.assert_close(whole[:, one], alone)
    if measure is frobenius:
        torch.testing.assert_close(whole.mean(-1), layer_errors(0, q, k, v, [QuantizedKVCache(1, Rope(D), policy)])[0])


def test_consumed_error_is_the_error_of_what_the_consumer_makes_of_it():
    x = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0))
    quantizer = UniformQuantizer(2, "per_token", 8)
    x_hat = quantizer.dequantize(quantizer.quantize(x))
    stored, consumed = consumed_error(x, lambda x: 3 * x, quantizer)
    assert stored == pytest.approx(consumed) == pytest.approx(relative_error(x, x_hat).mean().item())
    assert consumed_error(x, lambda x: x.new_ones(3, 3), quantizer) == (stored, 0.0)
    w = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    wanted = [100 * np.linalg.norm((a - b) @ w.numpy().T) / np.linalg.norm(a @ w.numpy().T)
              for a, b in zip(x.double().numpy(), x_hat.double().numpy(), strict=True)]
    assert consumed_error(x, lambda x: x @ w.T, quantizer)[1] == pytest.approx(np.mean(wanted), rel=1e-5)


def test_errors_average_over_layers_and_take_each_policy_alone():
    model, ids = small(), torch.randint(0, 50, (1, 40), generator=torch.Generator().manual_seed(1))
    chosen = [policies.get(f"k={key}:2:8,v=per_token:2:8,prefill=all") for key in ("per_token", "per_channel")]
    both, seen = errors(model, ids, chosen), []
    assert [errors(model, ids, [policy])[0] for policy in chosen] == both
    assert list(both[0]) == list(ERRORS)
    model(ids, Tap(2, model.config.rope, lambda layer, q, k, v: seen.append(
        layer_errors(layer, q, k, v, [model.new_cache(chosen[0])])[0])))
    torch.testing.assert_close(torch.tensor(list(both[0].values())), torch.stack(seen).mean(0).float())


def test_perplexity_is_over_all_tokens_but_the_first_in_any_cut():
    model, ids = small(), torch.randint(0, 50, (2, 60), generator=torch.Generator().manual_seed(1))
    probability = torch.softmax(model(ids), -1)
    wanted = -torch.stack([probability[b, range(59), ids[b, 1:]] for b in range(2)]).log()
    for chunk in (None, 1, 7, 60):
        cache = model.new_cache()
        torch.testing.assert_close(log_losses(model, ids, cache, chunk), wanted.detach(), rtol=1e-9, atol=1e-9)
        assert cache.length == 60
    assert perplexity(model, ids, model.new_cache()) == pytest.approx(wanted.mean().exp().item(), rel=1e-9)
    with pytest.raises(KvminiError, match="two tokens"):
        perplexity(model, ids[:, :1], model.new_cache())


def test_losses_of_a_long_call_and_of_a_continued_text():
    model, ids = small(context_length=400), torch.randint(0, 50, (1, 300), generator=torch.Generator().manual_seed(1))
    wanted = -torch.log_softmax(model(ids)[0], -1)[range(299), ids[0, 1:]].detach()
    torch.testing.assert_close(log_losses(model, ids, model.new_cache())[0], wanted, rtol=1e-9, atol=1e-9)
    cache = model.new_cache()
    model(ids[:, :100], cache)
    torch.testing.assert_close(log_losses(model, ids[:, 100:], cache, 30)[0], wanted[100:], rtol=1e-9, atol=1e-9)
    assert cache.length == 300
