"""Caches: bytes to the closed form, crop, reorder, and mistakes."""


import pytest
import torch
from cache_inputs import (
    HKV,
    D,
    G,
    bodies_equal,
    cache_policies,
    cut,
    handed,
    new_cache,
    run,
    tokens,
)
from hypothesis import given
from hypothesis import strategies as st

from kvmini import CachePolicy, KVCache, KvminiError, QuantizedKVCache, Rope, Side, UniformQuantizer, policies

# --- bytes

def side_bytes(n, side, sinks, batch, width, slots=None):
    """The closed form: exact tokens at `width` bytes, codes and (for each group) a float16 scale and minimum."""
    end = handed(n, side, sinks)
    body = max(0, end - sinks) if slots is None else slots
    exact = n - max(0, end - sinks)
    per_token = -(-D * side.quantizer.n_bits // 8) + D // G * 4 if side.quantizer.axis == "per_token" else 0
    per_group = 0 if per_token else G * -(-D * side.quantizer.n_bits // 8) + 4 * D
    return batch * HKV * (exact * D * width + body * per_token + body // G * per_group)


@given(cache_policies(), st.integers(1, 80), st.integers(1, 3),
       st.sampled_from([torch.float16, torch.float32, torch.float64]))
def test_nbytes_is_the_closed_form_and_nothing_else_stays_alive(policy, n, batch, dtype):
    q, k, v = tokens(n, batch, dtype=dtype)
    cache = new_cache(policy)
    run(cache, q, k, v, cut(n, n))
    expected = sum(side_bytes(n, side, policy.sinks, batch, dtype.itemsize) for side in (policy.key, policy.value))
    assert cache.nbytes == expected == cache.capacity_nbytes
    assert cache.bits_per_element == 8 * expected / (2 * batch * HKV * n * D)


def test_capacity_sees_a_float_copy_that_stays_alive():
    """The test above can fail: a window that is a view keeps the tokens that left it."""
    cache = new_cache(policies.get("k=per_channel:2:8,v=per_token:2:8"))
    cache.append(0, *tokens(30)[1:])
    cache.keys[0].window = torch.randn(1, HKV, 30, D)[..., 24:, :]
    assert cache.capacity_nbytes > cache.nbytes


def test_two_bits_at_groups_of_32_are_three_bits_per_element():
    cache = QuantizedKVCache(1, Rope(64), policies.get("c-t-2"))
    for n in (32, 64, 95, 200):
        cache.append(0, *(torch.randn(1, 3, n, 64) for _ in range(2)))
        assert cache.body_bits_per_element == 3.0
    windowed = QuantizedKVCache(1, Rope(64), policies.get("k=per_channel:2:32,v=per_token:2:32,residual=32"))
    windowed.append(0, *(torch.randn(1, 3, 64, 64) for _ in range(2)))
    assert windowed.body_bits_per_element == 3.0
    assert windowed.bits_per_element == (3 + 32) / 2 and windowed.bits_per_element_at(16) == (3 + 16) / 2


def test_an_exact_cache_counts_every_float():
    cache = KVCache(1, Rope(D))
    assert (cache.nbytes, cache.length, cache.bits_per_element, cache.body_bits_per_element) == (0, 0, 0.0, None)
    cache.append(0, *tokens(5, dtype=torch.float32)[1:])
    assert cache.nbytes == cache.capacity_nbytes == 2 * HKV * 5 * D * 4
    assert cache.bits_per_element == 32 and cache.bits_per_element_at(16) == 16
    cache.crop(3)
    assert cache.nbytes == cache.capacity_nbytes == 2 * HKV * 3 * D * 4


@pytest.mark.parametrize("cache", [
    KVCache(1, Rope(D)), new_cache(policies.get("k=per_token:2:8,v=per_token:2:8,sinks=9"))])
def test_a_cache_shares_no_memory_with_what_it_was_given(cache):
    _, k, v = (x[..., 10:13, :] for x in tokens(1000))
    cache.append(0, k, v)
    assert cache.capacity_nbytes == cache.nbytes
    before = cache.read(0)[1].clone()
    v.zero_()
    assert torch.equal(cache.read(0)[1], before)


# --- crop and reorder

@given(cache_policies(["exact", "streamed"]), st.integers(0, 99),
       st.lists(st.tuples(st.integers(1, 30), st.floats(0, 1)), min_size=1, max_size=4))
def test_crop_against_a_model_of_exact_or_quantized_flags(policy, seed, history):
    """Grow, crop, grow, crop ...: lengths, windows and which tokens are exact follow rules 7 and 11."""
    cache, rope, exact_v = new_cache(policy), Rope(D), torch.empty(1, HKV, 0, D, dtype=torch.float64)
    exact_k = exact_v
    bases, slots = [policy.sinks] * 2, [[], []]  # per side: where hand-over counts from; (size, live) of each block
    for step, (grow, keep) in enumerate(history):
        _, k, v = tokens(grow, seed=seed + step)
        cache.append(0, k, v)
        first = exact_v.shape[-2]
        exact_k = torch.cat([exact_k, rope.apply(k, range(first, first + grow))], dim=-2)
        exact_v = torch.cat([exact_v, v], dim=-2)
        for n, cropped in ((first + grow, False), (int(keep * (first + grow)), True)):
            if cropped:
                cache.crop(n)
                exact_k, exact_v = exact_k[..., :n, :], exact_v[..., :n, :]
            assert cache.length == n
            for i, side in enumerate((policy.key, policy.value)):
                in_body = sum(live for _, live in slots[i])
                if cropped:
                    keep_live, kept = max(0, n - policy.sinks), []
                    for size, live in slots[i]:
                        if keep_live > 0:
                            kept.append((size, min(live, keep_live)))
                            keep_live -= live
                    bases[i] = policy.sinks + sum(live for _, live in kept) if kept != slots[i] else bases[i]
                    slots[i] = kept
                else:
                    block = side.quantizer.block
                    new = handed(n, side, 0, bases[i]) - policy.sinks - in_body
                    slots[i] = slots[i] + [(block, block)] * (new // block)
            if n == 0:
                continue
            for i, (exact, got) in enumerate(zip((exact_k, exact_v), cache.read(0), strict=True)):
                end = policy.sinks + sum(live for _, live in slots[i])
                is_exact = (got == exact).all(-1).all(1)[0]
                expected = torch.tensor([j < policy.sinks or j >= end for j in range(n)])
                assert torch.equal(is_exact, expected)
                store = (cache.keys, cache.values)[i][0]
                assert store.body.n_tokens == sum(size for size, _ in slots[i])
    assert cache.capacity_nbytes == cache.nbytes


def test_crop_to_a_group_edge_leaves_what_was_there_before():
    q, k, v = tokens(48)
    policy = policies.get("k=per_channel:2:8,v=per_token:2:8")
    long, short = new_cache(policy), new_cache(policy)
    run(long, q, k, v, [48])
    long.crop(24)
    run(short, q[..., :24, :], k[..., :24, :], v[..., :24, :], [24])
    assert bodies_equal(long, short) and long.nbytes == short.nbytes == long.capacity_nbytes


def test_crop_within_what_was_cropped_keeps_the_right_tokens():
    policy = policies.get("k=per_channel:4:8,v=per_channel:4:8")
    cache, seen = new_cache(policy), torch.empty(1, HKV, 0, D, dtype=torch.float64)
    for step, (grow, keep) in enumerate([(8, 5), (8, 6), (10, 14), (9, 13), (8, 3)]):
        v = tokens(grow, seed=step)[2]
        cache.append(0, v, v)
        seen = torch.cat([seen, v], dim=-2)[..., :keep, :]
        cache.crop(keep)
        step_bound = (cache.read(0)[1] - seen).abs()
        assert step_bound.max() < 0.35  # half a step of 15 over a range of about 8: a token out of place is off by more
        assert cache.read(0)[1].shape[-2] == keep


def test_crop_to_nothing_is_an_empty_cache():
    for cache in (KVCache(1, Rope(D)), new_cache(policies.get("k=per_channel:2:8,v=per_token:2:8,sinks=3"))):
        q, k, v = tokens(20)
        first = run(cache, q, k, v, [12, 8])
        cache.crop(0)
        assert (cache.length, cache.nbytes, cache.capacity_nbytes) == (0, 0, 0)
        with pytest.raises(KvminiError, match="empty"):
            cache.reorder([0])
        assert torch.equal(run(cache, q, k, v, [12, 8]), first)
        cache.crop(0)
        run(cache, *tokens(5, batch=3), [5])  # of any batch size


@pytest.mark.parametrize("cache", [
    KVCache(1, Rope(D)), new_cache(policies.get("k=per_channel:2:8,v=per_token:2:8,residual=4,sinks=2"))])
def test_reorder_moves_sinks_body_and_window_alike(cache):
    q, k, v = tokens(30, batch=3)
    run(cache, q, k, v, [30])
    before = cache.read(0)
    cache.reorder([2, 0, 0])
    assert all(torch.equal(after, x[[2, 0, 0]]) for after, x in zip(cache.read(0), before, strict=True))
    for rows in ([3], [-1], [], [[0]], [0.5]):
        with pytest.raises(KvminiError, match="rows"):
            cache.reorder(rows)


def test_beams_follow_their_rows_through_later_steps():
    q, k, v = tokens(40, batch=3)
    policy = policies.get("k=per_channel:2:8,v=per_token:2:8,residual=4")
    rows = torch.tensor([2, 0, 0])
    moved, direct = new_cache(policy), new_cache(policy)
    run(moved, *(x[..., :20, :] for x in (q, k, v)), [20])
    moved.reorder(rows)
    out = run(moved, *(x[rows][..., 20:, :] for x in (q, k, v)), [1] * 20)
    expected = run(direct, *(x[rows] for x in (q, k, v)), [20, *[1] * 20])[..., 20:, :]
    assert torch.equal(out, expected)


# --- mistakes

def test_mistakes_are_named():
    with pytest.raises(KvminiError, match="per_tensor"):
        Side(UniformQuantizer(2, "per_tensor"))
    with pytest.raises(KvminiError, match=r"12.*8"):
        Side(UniformQuantizer(2, "per_channel", 8), flush_length=12)
    side = Side(UniformQuantizer(2, "per_token", 8))
    with pytest.raises(KvminiError, match="sinks"):
        CachePolicy(side, side, sinks=-1)
    with pytest.raises(KvminiError, match="streamed"):
        CachePolicy(side, side, prefill="none")
    cache = new_cache(CachePolicy(side, side))
    with pytest.raises(KvminiError, match="empty"):
        cache.read(0)
    q, k, v = tokens(5)
    run(cache, q, k, v, [5])
    for bad in (k[..., :8], k.float(), k.expand(2, -1, -1, -1), k[0]):
        with pytest.raises(KvminiError):
            cache.append(0, bad, bad)
    with pytest.raises(KvminiError, match="alike"):
        cache.append(0, k, v[..., :3, :])
    for n in (6, -1, 2.5, None):
        with pytest.raises(KvminiError, match="holds 5"):
            cache.crop(n)
    assert cache.length == 5
    for bad in (0.0, -1, 10**20, True):
        with pytest.raises(KvminiError, match="residual_length"):
            Side(UniformQuantizer(2), residual_length=bad)


@pytest.mark.parametrize("residual", [0, 128])
@pytest.mark.parametrize(("bad", "says"), [(torch.nan, "1 of 128"), (torch.inf, "1 of 128"), (1e9, "does not fit")])
def test_a_bad_value_names_layer_and_side_and_is_not_kept(residual, bad, says):
    """At once, also where a window would hide it for long; an exact value that fits no scale waits for its turn."""
    policy = policies.get(f"k=per_token:2:8,v=per_token:2:8,sinks=1,residual={residual}")
    cache, clean = (QuantizedKVCache(3, Rope(D), policy) for _ in range(2))
    q, k, v = tokens(4)
    bad_v = v.clone()
    bad_v[0, 1, 2, 3] = bad
    if bad != 1e9 or residual == 0:
        with pytest.raises(KvminiError, match=rf"layer 2, values: .*{says}"):
            cache.append(2, k, bad_v)
        assert cache.nbytes == 0 and cache.keys[2].length == cache.values[2].length == 0
    cache.crop(0)
    assert torch.equal(cache.attend(1, q, k, v), clean.attend(1, q, k, v))


def test_queries_must_fit_their_keys():
    for cache in (KVCache(1, Rope(D)), new_cache(policies.get("c-t-2", group_size=8))):
        q, k, v = tokens(4)
        for bad in (q[0], q[:, :3], q[..., :3, :], q.expand(2, -1, -1, -1), q.float(), q[..., :8]):
            with pytest.raises(KvminiError, match="queries"):
                cache.attend(0, bad, k, v)
        with pytest.raises(KvminiError, match="S >= 1"):
            cache.attend(0, q[..., :0, :], k[..., :0, :], v[..., :0, :])
        with pytest.raises(KvminiError, match="floating"):
            cache.append(0, k.long(), v.long())
        assert cache.length == 0


def test_a_callable_gives_each_layer_its_quantizer():
    asked = []
    side = Side(lambda layer: asked.append(layer) or UniformQuantizer(2 + layer, "per_token", 8))
    cache = QuantizedKVCache(3, Rope(D), CachePolicy(side, side))
    assert [store.quantizer.n_bits for store in cache.keys] == [2, 3, 4]
    assert sorted(asked) == [0, 0, 1, 1, 2, 2]  # once for keys, once for values: making one may cost a calibration
    with pytest.raises(KvminiError, match="per_tensor"):
        QuantizedKVCache(1, Rope(D), CachePolicy(side, Side(lambda layer: UniformQuantizer(2, "per_tensor"))))
