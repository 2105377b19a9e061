"""Stores and caches: what is exact when, what is stored, how many bytes, crop and reorder."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvmini import CachePolicy, KVCache, KvminiError, QuantizedKVCache, Rope, Side, UniformQuantizer, policies
from kvmini.attention import CHUNK, View, attention, attention_weights, weighted_sum

D, HKV, H, G = 16, 2, 4, 8
AXES = ("per_token", "per_channel")
PREFILLS = ("exact", "streamed", "all")


def tokens(n, batch=1, seed=0, dtype=torch.float64):
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, heads, n, D, generator=random, dtype=torch.float64) for heads in (H, HKV, HKV))
    k[..., 3] *= 20
    return q.to(dtype), k.to(dtype), v.to(dtype)


def cut(n, seed):
    """n tokens cut into calls: a list of sizes that sum to n."""
    random, sizes = torch.Generator().manual_seed(seed), []
    while sum(sizes) < n:
        sizes.append(min(n - sum(sizes), int(torch.randint(1, 12, (), generator=random))))
    return sizes


def run(cache, q, k, v, sizes):
    outputs = [cache.attend(0, *part) for part in zip(*(x.split(sizes, dim=-2) for x in (q, k, v)), strict=True)]
    return torch.cat(outputs, dim=-2)


def new_cache(policy):
    return QuantizedKVCache(1, Rope(D), policy)


@st.composite
def sides(draw):
    quantizer = UniformQuantizer(draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from(AXES)), G)
    flush = quantizer.block * draw(st.integers(1, 3)) if draw(st.booleans()) else None
    return Side(quantizer, draw(st.sampled_from([0, 1, 5, 8, 20])), flush)


def cache_policies(prefills=PREFILLS):
    return st.builds(CachePolicy, sides(), sides(), st.sampled_from([0, 1, 4]), st.booleans(),
                     st.sampled_from(prefills))


def handed(n, side, sinks, base=None):
    """Rule 7: the first token that is still in the window, of n tokens."""
    flush = side.flush_length or side.quantizer.block
    base = sinks if base is None else base
    return base + max(0, n - base - side.residual_length) // flush * flush


def bodies_equal(a, b):
    return all(x.body.shape == y.body.shape and all(torch.equal(x.body.parts[p], y.body.parts[p]) for p in x.body.parts)
               for x, y in zip(a.keys + a.values, b.keys + b.values, strict=True))


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

@given(cache_policies(), st.integers(1, 60), st.integers(0, 99))
def test_windows_are_exact_by_the_hand_over_rule_and_the_rest_is_quantized(policy, n, seed):
    q, k, v = tokens(n, seed=seed)
    cache = new_cache(policy)
    run(cache, q, k, v, cut(n, seed))
    rope = Rope(D)
    keys, values = cache.read(0)
    for side, exact, got in ((policy.key, rope.apply(k, range(n)), keys), (policy.value, v, values)):
        end = handed(n, side, policy.sinks)
        assert got.shape == exact.shape
        assert torch.equal(got[..., :policy.sinks, :], exact[..., :policy.sinks, :])
        assert torch.equal(got[..., end:, :], exact[..., end:, :])
        stored = slice(policy.sinks, end)
        assert (got[..., stored, :] != exact[..., stored, :]).any(-1).all()  # every older token is really quantized
    assert cache.length == n and list(cache.positions) == list(range(n))


@given(cache_policies(), st.integers(1, 60), st.integers(0, 99))
def test_what_is_stored_never_depends_on_the_calls(policy, n, seed):
    q, k, v = tokens(n, seed=seed)
    caches = [new_cache(policy) for _ in range(3)]
    for cache, sizes in zip(caches, ([n], [1] * n, cut(n, seed)), strict=True):
        run(cache, q, k, v, sizes)
    assert bodies_equal(caches[0], caches[1]) and bodies_equal(caches[0], caches[2])
    assert all(torch.equal(a, b) for other in caches[1:] for a, b in zip(caches[0].read(0), other.read(0), strict=True))


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

@given(cache_policies(["streamed"]), st.integers(1, 60), st.integers(0, 99))
def test_streamed_equals_one_token_at_a_time(policy, n, seed):
    q, k, v = tokens(n, seed=seed)
    one_by_one = run(new_cache(policy), q, k, v, [1] * n)
    for sizes in ([n], cut(n, seed)):
        torch.testing.assert_close(run(new_cache(policy), q, k, v, sizes), one_by_one, rtol=1e-10, atol=1e-10)


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


@given(cache_policies(["exact"]), st.integers(1, 60))
def test_an_exact_prefill_sees_its_own_tokens_exactly(policy, n):
    q, k, v = tokens(n)
    exact = run(KVCache(1, Rope(D)), q, k, v, [n])
    assert torch.equal(run(new_cache(policy), q, k, v, [n]), exact)


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
        for bad in (q[:, :3], q[..., :3, :], q.expand(2, -1, -1, -1), q.float(), q[..., :8]):
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
