"""What keys, attention and the residual stream look like: the formulas, on small tensors and a small model."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_model import small

from kvmini import Rope
from kvmini.evaluate import perplexity
from kvmini.phenomena import (
    causal_weights,
    exact_layers,
    largest_channels,
    massive,
    overlap,
    persistence,
    received,
    replaced,
    residual_stream,
    sparsity,
)


def softmax_by_hand(q, k):
    """Causal attention weights of rotated `[T, D]`, row by row."""
    T, D = q.shape
    weights = np.zeros((T, T))
    for i in range(T):
        scores = np.exp(k[:i + 1] @ q[i] / np.sqrt(D))
        weights[i, :i + 1] = scores / scores.sum()
    return weights


def test_weights_sparsity_and_attention_received_are_those_of_the_definition():
    random = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 4, 9, 8, generator=random).double(), torch.randn(1, 2, 9, 8, generator=random).double()
    rope = Rope(8)
    weights = causal_weights(q, k, rope)
    q, k = (rope.apply(x, range(9))[0].numpy() for x in (q, k))
    for head in range(4):
        wanted = softmax_by_hand(q[head], k[head // 2])
        np.testing.assert_allclose(weights[0, head], wanted, rtol=1e-12)
        causal = wanted[np.tril_indices(9)]
        for threshold in (1e-3, 0.1, 0.5):
            assert sparsity(weights, threshold)[0, head].item() == pytest.approx((causal < threshold).mean())
        np.testing.assert_allclose(received(weights)[0, head], wanted.sum(0) / 9, rtol=1e-12)
        assert received(weights)[0, head].sum().item() == pytest.approx(1)


@given(st.integers(0, 10**6), st.integers(1, 6))
def test_large_channels_are_found_however_they_are_signed_and_scaled(seed, n):
    random = np.random.default_rng(seed)
    x = random.normal(size=(2, 12, 8))
    chosen = np.stack([random.permutation(8)[:n] for _ in range(2)])
    for head in range(2):
        x[head][:, chosen[head]] = (50 + x[head][:, chosen[head]]) * random.choice([-1, 1], n)
    x = torch.tensor(x * 10.0 ** random.integers(-6, 6))
    marked = largest_channels(x, n)
    assert [sorted(row.nonzero()[:, 0].tolist()) for row in marked] == [sorted(row.tolist()) for row in chosen]
    assert persistence(x, n).tolist() == [1.0, 1.0]
    assert overlap(marked) == pytest.approx(len(set(chosen[0]) & set(chosen[1])) / n)


def test_persistence_is_the_share_by_chance_where_nothing_is_fixed():
    x = torch.randn(1, 4000, 16, generator=torch.Generator().manual_seed(0))
    assert persistence(x, 4).item() == pytest.approx(4 / 16, abs=0.02)


def test_massive_numbers_are_found_where_they_were_put():
    state = torch.randn(20, 32, generator=torch.Generator().manual_seed(0)).double()
    state[3, 7], state[0, 9] = -5000.0, 2000.0
    first, second = massive([torch.zeros(20, 32) + 1, state], ratio=1000)
    assert (first["layer"], first["token"], first["dimension"], first["value"]) == (1, 3, 7, -5000.0)
    assert (second["token"], second["dimension"]) == (0, 9)
    assert first["ratio"] == pytest.approx(5000 / np.median(state.abs()), rel=0.01)
    assert massive([state], ratio=10**5) == []


def test_replacing_numbers_changes_the_state_there_and_nothing_once_it_is_over():
    model, ids = small(), torch.randint(0, 50, (1, 12), generator=torch.Generator().manual_seed(1))
    before = residual_stream(model, ids)
    same = {(0, 2, 5): before[0][0, 2, 5].item(), (1, 0, 1): before[1][0, 0, 1].item()}
    with replaced(model, same):
        for a, b in zip(residual_stream(model, ids), before, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    with replaced(model, {(0, 2, 5): 9.0, (1, 3, 4): -7.0}):
        first, second = residual_stream(model, ids)
        assert first[0, 2, 5] == 9.0 and second[0, 3, 4] == -7.0
        assert torch.equal(first[0, :2], before[0][0, :2]) and not torch.equal(second[0, 2:], before[1][0, 2:])
        assert torch.equal(second[0, :2], before[1][0, :2])  # earlier tokens cannot see it
        changed = perplexity(model, ids, model.new_cache())
    assert changed != perplexity(model, ids, model.new_cache())
    for a, b in zip(residual_stream(model, ids), before, strict=True):
        assert torch.equal(a, b)


def test_hooks_go_when_the_run_fails():
    model = small()
    with pytest.raises(ZeroDivisionError), replaced(model, {(0, 0, 0): 1.0}):
        raise ZeroDivisionError
    with pytest.raises(ValueError):
        residual_stream(model, torch.zeros(1, 0, dtype=torch.long))
    assert not any(layer._forward_hooks for layer in model.layers)


def test_every_layer_is_shown_unrotated():
    model, ids, seen = small(), torch.randint(0, 50, (1, 7)), []
    exact_layers(model, ids, lambda layer, q, k, v: seen.append((layer, q.shape[-2], k.shape == v.shape)))
    assert seen == [(0, 7, True), (1, 7, True)]
