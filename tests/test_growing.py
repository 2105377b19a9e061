"""Growing in place: values as `torch.cat` gives them, storage that moves seldom, views that never change."""

import pytest
import torch
from cache_inputs import HKV, D, new_cache, tokens
from hypothesis import given
from hypothesis import strategies as st

from kvmini import KVCache, Rope, policies
from kvmini.growing import append, growable


def numbers(n, seed=0):
    return torch.randn(2, 3, n, 4, generator=torch.Generator().manual_seed(seed))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40)), max_size=12))
def test_it_is_cat_whatever_is_appended_to_whatever_came_before(steps):
    """A tree of appends: each step continues one of the earlier results, and none of them ever changes."""
    made = [growable(numbers(5))]
    expected = [made[0].clone()]
    for seed, (parent, n) in enumerate(steps):
        more = numbers(n, seed)
        made.append(append(made[parent % len(made)], more))
        expected.append(torch.cat([expected[parent % len(expected)], more], dim=-2))
    assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))


def test_storage_moves_seldom_and_keeps_little_room():
    x, places = growable(numbers(1)), set()
    for n in range(2, 2000):
        x = append(x, numbers(1))
        places.add(x.data_ptr())
        assert x.shape[-2] == n and x.untyped_storage().nbytes() <= 2 * x.nbytes + 8 * 2 * 3 * 4 * 4
    assert len(places) < 40  # log(2000) / log(1.25) is 34


def test_what_was_not_made_growable_is_joined_tightly():
    joined = append(numbers(5), numbers(3))
    assert joined.untyped_storage().nbytes() == joined.nbytes and not hasattr(joined, "room")


def test_a_graph_keeps_its_tensors():
    x = numbers(3).requires_grad_()
    whole = append(append(growable(x * 1), numbers(2)), x)
    whole.square().sum().backward()
    assert torch.allclose(x.grad, 4 * x)


def test_what_was_made_in_inference_mode_can_be_appended_to_outside_of_it():
    with torch.inference_mode():
        x = append(growable(numbers(3)), numbers(2))
    assert torch.equal(append(x, numbers(1))[..., :3, :], numbers(3))


@pytest.mark.parametrize("policy", [None, "k=per_channel:2:8,v=per_token:2:8,residual=16",
                                    "k=per_token:3:8,v=per_channel:4:8", "k=e4m3,v=hybrid:per_token:2:8"])
def test_no_step_of_a_cache_copies_what_is_stored(policy):
    """Each part of a body moves as seldom as a growing tensor does, although a step hands over a block."""
    cache = KVCache(1, Rope(D)) if policy is None else new_cache(policies.get(policy))
    _, k, v = tokens(600)
    places = {}
    for t in range(600):
        cache.append(0, k[..., t:t + 1, :], v[..., t:t + 1, :])
        for side, store in zip("kv", cache.stores(), strict=True):
            parts = {"tokens": store.tokens} if policy is None else store.body.parts
            for name, part in parts.items():
                places.setdefault((side, name), set()).add(part.data_ptr())
    assert all(len(seen) < 30 for seen in places.values())
    assert cache.nbytes <= cache.capacity_nbytes <= 1.3 * cache.nbytes + 64 * HKV * D * 8


def test_a_failed_call_leaves_what_grew_as_it_was():
    cache = new_cache(policies.get("k=per_channel:2:8,v=per_token:2:8,residual=8"))
    _, k, v = tokens(80)
    cache.append(0, k[..., :40, :], v[..., :40, :])
    before = [x.clone() for x in cache.read(0)]
    bad = v[..., 40:60, :].clone()
    bad[..., 3, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        cache.append(0, k[..., 40:60, :], bad)
    assert all(torch.equal(a, b) for a, b in zip(cache.read(0), before, strict=True))
    cache.append(0, k[..., 40:, :], v[..., 40:, :])
    other = new_cache(policies.get("k=per_channel:2:8,v=per_token:2:8,residual=8"))
    other.append(0, k, v)
    assert all(torch.equal(a, b) for a, b in zip(cache.read(0), other.read(0), strict=True))
