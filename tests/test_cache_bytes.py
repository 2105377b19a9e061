"""Caches: bytes to the closed form, crop, reorder, and mistakes."""

import pytest
import torch
from cache_inputs import (
    HKV,
    D,
    G,
    bodies_equal,
    new_cache,
    run,
    tokens,
)

from kvmini import CachePolicy, KVCache, KvminiError, QuantizedKVCache, Rope, Side, UniformQuantizer, policies

# --- bytes

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

def test_crop_to_a_group_edge_leaves_what_was_there_before():
    q, k, v = tokens(48)
    policy = policies.get("k=per_channel:2:8,v=per_token:2:8")
    long, short = new_cache(policy), new_cache(policy)
    run(long, q, k, v, [48])
    long.crop(24)
    run(short, q[..., :24, :], k[..., :24, :], v[..., :24, :], [24])
    assert bodies_equal(long, short) and long.nbytes == short.nbytes == long.capacity_nbytes


def test_slots_that_a_crop_drops_inside_a_group_still_count():
    """Groups are never cut: two groups of 8 stay for 13 tokens; per token, nothing stays behind."""
    cache = new_cache(policies.get("k=per_channel:2:8,v=per_token:2:8"))
    cache.append(0, *tokens(48)[1:])
    cache.crop(13)
    assert (cache.keys[0].body.n_tokens, cache.values[0].body.n_tokens, cache.length) == (16, 13, 13)
    codes, scales = HKV * D * 2 // 8, HKV * D // G * 4  # bytes of a token; a float16 scale and minimum a group
    assert cache.nbytes == cache.capacity_nbytes == (16 + 13) * (codes + scales)


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
        assert cache.bits_per_element == cache.bits_per_element_at(16) == 0.0 and cache.body_bits_per_element is None
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
        with pytest.raises(KvminiError, match=r"rows 0 \.\. 2, not "):
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
    for bad in (k[..., :8], k.float(), k.expand(2, -1, -1, -1)):
        with pytest.raises(KvminiError, match=r"the cache holds torch.float64 \[1, 2, T, 16\] and cannot take"):
            cache.append(0, bad, bad)
    with pytest.raises(KvminiError, match="alike"):
        cache.append(0, k[0], k[0])
    with pytest.raises(KvminiError, match="alike"):
        cache.append(0, k, v[..., :3, :])
    for n in (6, -1, 2.5, None):
        with pytest.raises(KvminiError, match="holds 5"):
            cache.crop(n)
    assert cache.length == 5
    for bad in (0.0, -1, 10**20, True):
        with pytest.raises(KvminiError, match="residual_length"):
            Side(UniformQuantizer(2), residual_length=bad)
        with pytest.raises(KvminiError, match="flush_length"):
            Side(UniformQuantizer(2), flush_length=bad)


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
