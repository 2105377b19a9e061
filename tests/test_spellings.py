"""Every named policy, and every word of a spelling, on a small random model: calibrated, streamed, cut, cropped."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from cache_inputs import cut
from test_model import small
from test_remat import close, ids_of, logits

from kvmini import KvminiError, Rope, policies
from kvmini.cache import CachePolicy
from kvmini.calibration import calibrate
from kvmini.quantizers.float8 import Float8Quantizer
from kvmini.quantizers.nonuniform import StaticQuantizer, TokenwiseQuantizer
from kvmini.quantizers.normalized import ScaledQuantizer
from kvmini.quantizers.rotated import ClippedQuantizer, HadamardQuantizer, ReorderedQuantizer
from kvmini.quantizers.sparse import StaticOutliers, TopOutliers, thresholds
from kvmini.quantizers.uniform import UniformQuantizer
from kvmini.spellings import CALIBRATED, MODIFIERS, Spelled

GRIDS = ("per_token:2:16", "per_channel:2:16", "hybrid:per_token:3:16", "least_squares:per_channel:2:8", "nonuniform:2",
         "nonuniform:3", "static:3", "static-tensor:4", "e4m3", "e5m2:per_tensor", "e4m3:per_head", "exact")
SIZES = {"n_heads": 9, "n_kv_heads": 3, "head_dim": 64, "hidden_size": 192, "rope": Rope(64), "context_length": 400}
T = 300  # past KIVI's 128 tokens, InnerQ's 32 + 128 + 96, and a group of 128


@pytest.fixture(scope="module")
def known():
    """A model of the default one's heads, and its calibration, one first token left out."""
    model = small(**SIZES)
    return model, replace(calibrate(model, ids_of(160), passage=40), sinks=1)


def get(known, name, **more):
    return replace(policies.get(name, calibration=known[1]), **more)


# --- all that has a name

@pytest.mark.parametrize("name", policies.NAMES[1:])
def test_a_named_policy_stores_the_same_however_its_calls_are_cut(name, known):
    """And reads it back: streamed in one call and in pieces, cropped, its rows moved."""
    model, ids = known[0], ids_of(T, batch=2)
    outputs, caches = [], []
    for sizes in ([T], [100, *cut(T - 100, 3)]):
        cache = model.new_cache(get(known, name, prefill="streamed"))
        outputs.append(logits(model, ids, cache, sizes))
        caches.append(cache)
    close(outputs[1], outputs[0], 1e-8)
    whole, pieces = caches
    for a, b in zip(whole.stores(), pieces.stores(), strict=True):
        assert a.body.n_tokens == b.body.n_tokens > 0
        assert all(torch.equal(part, b.body.parts[part_name]) for part_name, part in a.body.parts.items())
    assert whole.nbytes == pieces.nbytes <= pieces.capacity_nbytes
    before = whole.read(1)
    pieces.crop(290)
    pieces.reorder([1])
    for found, was in zip(pieces.read(1), before, strict=True):
        close(found, was[1:, :, :290], 1e-8)
    more = logits(model, ids[1:, 290:], pieces, [1] * (T - 290))
    assert torch.isfinite(more).all() and pieces.length == T


@pytest.mark.parametrize("name", policies.NAMES[1:])
def test_a_named_policy_streamed_is_one_token_at_a_time(name, known):
    model, ids, start = known[0], ids_of(T), T - 25
    streamed = model.new_cache(get(known, name, prefill="streamed"))
    decoded = model.new_cache(get(known, name, prefill="streamed"))
    logits(model, ids[:, :start], decoded, [start])
    one_by_one = logits(model, ids[:, start:], decoded, [1] * 25)
    close(logits(model, ids, streamed, [T])[:, start:], one_by_one, 1e-8)


def test_every_side_of_every_named_policy_loses_something_and_nothing_wild(known):
    """A recipe whose parts do not fit each other shows here: a stored error of 0, or past that of storing nothing."""
    model, ids, exact = known[0], ids_of(T), known[0].new_cache()
    logits(model, ids, exact, [T])
    for name in policies.NAMES[1:]:
        cache = model.new_cache(get(known, name))
        logits(model, ids, cache, [T])
        for which in (0, 1):
            lost = (cache.read(0)[which] - exact.read(0)[which]).norm() / exact.read(0)[which].norm()
            assert 0 < lost < 0.9, f"{name}, {'kv'[which]}: {lost:.2f}"


# --- words

@pytest.mark.parametrize(("modifier", "grid"), [*product(["", *MODIFIERS], GRIDS)])
def test_every_modifier_goes_around_every_grid_or_says_why_not(modifier, grid, known):
    spelled = f"{modifier}+{grid}" if modifier else grid
    fits = modifier != "normalized" or (grid.split(":")[0] not in CALIBRATED and not grid.endswith(("tensor", "head")))
    uniform = grid.startswith(("per_", "hybrid", "least"))
    model, ids = known[0], ids_of(200)
    for side in "kv":
        if not fits or (modifier == "clipped" and not uniform):
            with pytest.raises(KvminiError) as error:
                Spelled(spelled, side).quantizer(known[1])
            assert "\n" not in str(error.value)
            continue
        policy = policies.get(f"k={spelled},v=exact,pre-rope" if side == "k" else f"k=exact,v={spelled}",
                              calibration=known[1])
        cache = model.new_cache(policy)
        assert torch.isfinite(logits(model, ids, cache, [150, 49, 1])).all()
        assert next(iter(cache.stores())).body is not None


def test_words_learn_behind_one_another(known):
    """The order is one of rotated channels, the thresholds are those of scaled keys."""
    x, _ = known[1].of("k", 1)
    rotated = Spelled("hadamard+reordered+clipped+per_token:2:16", "k").quantizer(known[1], 1)
    assert [type(q) for q in (rotated, rotated.inner, rotated.inner.inner, rotated.inner.inner.inner)] == [
        HadamardQuantizer, ReorderedQuantizer, ClippedQuantizer, UniformQuantizer]
    means = HadamardQuantizer(None).forward(x).double().mean(1).flatten()[rotated.inner.order]
    assert (means.diff() >= 0).all()
    scaled = Spelled("scaled+outliers+static:3", "k").quantizer(known[1], 1)
    low, high = thresholds(ScaledQuantizer(None, scaled.factor).forward(x), 0.01)
    assert torch.equal(scaled.inner.low, low) and torch.equal(scaled.inner.high, high)
    torch.testing.assert_close(scaled.inner.inner.low, low)  # the range is that of what outliers leave


def test_kvquant_is_static_for_keys_and_a_tokens_own_for_values(known):
    keys, values = (Spelled("outliers+nonuniform:3", side).quantizer(known[1]) for side in "kv")
    assert type(keys) is StaticOutliers and type(keys.inner) is StaticQuantizer
    assert type(values) is TopOutliers and type(values.inner) is TokenwiseQuantizer and values.share == 0.01
    for side in "kv":  # Q-Norm: at 2 bits alone a code means another number than it was rounded to
        books = [Spelled(f"outliers+nonuniform:{bits}", side).quantizer(known[1]).inner.codebook for bits in (2, 3)]
        assert [len(book.levels) for book in books] == [4, 8]
        assert books[0].values is not None and books[1].values is None


def test_layers_have_quantizers_of_their_own_made_once(known):
    policy = get(known, "kvquant-3")
    first, second = policy.key.quantizer(0), policy.key.quantizer(1)
    assert policy.key.quantizer(0) is first and not torch.equal(first.low, second.low)


def test_sinks_are_those_that_calibration_found(known):
    assert get(known, "rotatekv-2").sinks == 1
    assert policies.get("rotatekv-2", calibration=replace(known[1], sinks=5)).sinks == 5


def test_float8_is_of_scale_1_or_of_the_largest_number(known):
    policy = policies.get("fp8-e4m3")
    assert isinstance(policy, CachePolicy) and policy.sinks == 0
    assert type(policy.key.quantizer) is Float8Quantizer
    assert vars(policy.key.quantizer) == {"format": "e4m3", "scale": 1.0}
    x, _ = known[1].of("v", 1)
    found = get(known, "fp8-e4m3-calibrated").value.quantizer(1)
    assert float(found.scale) == pytest.approx(x.abs().max().item() / 448, rel=1e-6)


@pytest.mark.parametrize(("policy", "says"), [
    ("k=spun+per_token:2:16,v=exact", "unknown modifier 'spun'"), ("k=hadamard,v=exact", "must be"),
    ("k=hadamard+,v=exact", "must be"), ("k=e4m3:per_channel,v=exact", "must be"), ("k=e4m4,v=exact", "must be"),
    ("k=nonuniform:9,v=exact", "1 to 8"), ("k=nonuniform:x,v=exact", "bits of k"), ("k=exact:2,v=exact", "exact:2"),
    ("k=hybrid:per_token:1:16,v=exact", "hybrid n_bits"), ("x=per_token:2:64,v=exact", "x= alone"),
    ("x=per_token:2:64,pre-rope", "leave it out"), ("x=nonuniform:3", "of keys and values only"),
    ("x=e4m3:per_tensor", "of keys and values only"), ("x=reordered+per_token:2:16", "of keys and values only"),
    ("k=normalized+reordered+per_token:2:16,v=exact", "each sequence's own"),
    ("k=normalized+outliers+per_token:2:16,v=exact", "each sequence's own"),
    ("k=exact,v=exact,sinks=small", "sinks must be")])
def test_a_bad_word_is_named(policy, says, known):
    with pytest.raises(KvminiError, match=says) as error:
        known[0].new_cache(policies.get(policy, calibration=known[1]))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [name for name in policies.NAMES if policies.needs_calibration(name)])
def test_what_needs_a_calibration_says_so(name):
    with pytest.raises(KvminiError, match="needs a calibration of the model"):
        policies.get(name)
