"""Stores and caches: what is exact when, what is stored, and what a call sees."""

from dataclasses import replace

import pytest
import torch
from cache_inputs import (
    HKV,
    PREFILLS,
    D,
    H,
    cache_policies,
    cut,
    new_cache,
    run,
    tokens,
)
from hypothesis import example, given
from hypothesis import strategies as st

from kvmini import KVCache, Rope, policies
from kvmini.attention import CHUNK, View, attention, attention_weights, weighted_sum

# --- attention

def test_attention_is_softmax_of_scores_times_values():
    """Against the plainest loop, with a call that is not the first (7 + 9 tokens: a mask of 9 by 16)."""
    q, k, v = tokens(16)
    out = attention(q[..., 7:, :], View(k), View(v), first=7)
    for head in range(H):
        for i in range(9):
            scores = k[0, head // 2, :8 + i] @ q[0, head, 7 + i] / D**0.5
            expected = torch.softmax(scores, 0) @ v[0, head // 2, :8 + i]
            torch.testing.assert_close(out[0, head, i], expected, rtol=1e-12, atol=1e-12)


def test_attention_does_not_depend_on_its_chunks():
    q, k, v = tokens(CHUNK + 70)
    whole = weighted_sum(attention_weights(q, View(k), 0), View(v))
    torch.testing.assert_close(attention(q, View(k), View(v), 0), whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_rounded_once_and_ignore_the_future(dtype):
    q, k, v = tokens(9, dtype=dtype)
    weights = attention_weights(q, View(k), 0)
    assert weights.dtype == dtype and (weights.triu(1) == 0).all()
    scores = (q / D**0.5).unflatten(1, (HKV, -1)) @ k[:, :, None].mT  # in the narrow type, as given to the softmax
    wanted = torch.softmax(scores.double().flatten(1, 2) + torch.full((9, 9), -torch.inf).triu(1), -1)
    assert ((weights.double() - wanted).abs() <= torch.finfo(dtype).eps / 2 * wanted + 1e-7).all()  # rounded once
    assert torch.isfinite(attention(q, View(k), View(v), 0)).all()


# --- when tokens are handed over

def test_kivi_keeps_a_sawtooth_of_keys_and_the_last_128_values():
    cache = new_cache(policies.get("k=per_channel:2:8,k-flush=128,v=per_token:2:8,v-residual=128"))
    for n in range(1, 300):
        cache.append(0, *tokens(1, seed=n)[1:])
        assert cache.keys[0].window.shape[-2] == n % 128
        assert cache.values[0].window.shape[-2] == min(n, 128)


def test_a_per_channel_group_is_never_a_single_token():
    """A group of one has error 0 and is billed as 2 bits all the same."""
    cache = new_cache(policies.get("k=per_channel:2:8,v=per_token:2:8,residual=8"))
    q, k, v = tokens(200, seed=25)
    run(cache, q, k, v, [40, *[1] * 160])
    error = (cache.read(0)[0] - Rope(D).apply(k, range(200))).abs().mean((0, 1, 3))
    assert (error[:180] > 0.05).all()


# --- what a call sees

@given(cache_policies(["streamed"]), st.integers(1, 40), st.integers(1, 40), st.floats(0, 1), st.integers(0, 99))
@example(policies.get("k=per_channel:2:8,v=per_channel:2:8,residual=5,prefill=streamed"), 40, 30, 0.7, 0)
def test_streamed_equals_one_token_at_a_time_after_a_crop_too(policy, n, more, keep, seed):
    q, k, v = tokens(n + more, seed=seed)
    outputs, kept = [], int(keep * n)
    for sizes in ([more], [1] * more, cut(more, seed)):
        cache = new_cache(policy)
        run(cache, *(x[..., :n, :] for x in (q, k, v)), [n])
        cache.crop(kept)
        outputs.append(run(cache, *(x[..., n:, :] for x in (q, k, v)), sizes))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(outputs[2], outputs[1], rtol=1e-10, atol=1e-10)


@given(cache_policies(["all"]), st.integers(2, 60))
def test_all_sees_everything_dequantized_but_sinks_and_an_unfilled_last_group(policy, n):
    q, k, v = tokens(n)
    rope = Rope(D)

    def seen(side, x):
        end = policy.sinks + max(0, n - policy.sinks) // side.quantizer.block * side.quantizer.block
        middle = side.quantizer.dequantize(side.quantizer.quantize(x[..., policy.sinks:end, :]))
        return torch.cat([x[..., :policy.sinks, :], middle, x[..., end:, :]], dim=-2)

    rotated = rope.apply(k, range(n))
    keys = rope.apply(seen(policy.key, k), range(n)) if policy.pre_rope else seen(policy.key, rotated)
    expected = attention(rope.apply(q, range(n)), View(keys), View(seen(policy.value, v)), 0)
    torch.testing.assert_close(run(new_cache(policy), q, k, v, [n]), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("prefill", PREFILLS)
def test_windows_that_cover_everything_give_the_exact_cache(prefill):
    policy = replace(policies.get("k=per_channel:2:8,v=per_token:2:8,residual=64"), prefill=prefill, sinks=3)
    if prefill == "all":
        policy = replace(policy, sinks=64)  # "all" ignores the window, not the sinks
    q, k, v = tokens(50)
    for sizes in ([50], [1] * 50, cut(50, 1)):
        torch.testing.assert_close(run(new_cache(policy), q, k, v, sizes), run(KVCache(1, Rope(D)), q, k, v, sizes),
                                   rtol=1e-12, atol=1e-12)


def test_one_head_of_each_kind_is_enough():
    q, k, v = (x[:, :1] for x in tokens(20))
    for policy in (None, policies.get("k=per_channel:2:8,v=per_token:2:8")):
        cache = KVCache(1, Rope(D)) if policy is None else new_cache(policy)
        assert run(cache, q, k, v, [12, 8]).shape == (1, 1, 20, D)


@pytest.mark.parametrize("heads", [1, HKV])
@pytest.mark.parametrize("prefill", ["all", "streamed"])
def test_a_call_of_one_token_is_a_step_whatever_prefill_says(prefill, heads):
    """It sees the store as it was, and itself exactly; `prefill` governs longer calls only."""
    q, k, v = (x[:, :heads] for x in tokens(30))
    policy = policies.get("k=per_channel:2:8,v=per_token:2:8")
    step = run(new_cache(policy), q, k, v, [1] * 30)
    assert torch.equal(run(new_cache(replace(policy, prefill=prefill)), q, k, v, [1] * 30), step)
    assert not torch.equal(run(new_cache(replace(policy, prefill="all")), q, k, v, [30]), step)
