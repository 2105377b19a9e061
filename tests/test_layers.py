"""Layers and reach: one layer at a time is one layer; what an interval cannot say is not said; what was found holds."""

import pytest
import torch
from test_model import small
from test_remat import ids_of, logits

from kvmini import policies
from kvmini.evaluate import log_losses
from kvmini.experiments.layers import findings, only, share_avoided
from kvmini.experiments.reach import CHOSEN, rise
from kvmini.experiments.run import Run, as_streamed
from kvmini.quantizers.exact import ExactQuantizer
from kvmini.texts import prose, text_ids

POLICY = policies.get("k=per_token:2:8,v=per_channel:2:8,sinks=2,pre-rope")


def test_only_the_layers_chosen_are_quantized():
    model, ids = small(), ids_of(40)
    alone = only(POLICY, lambda layer: layer == 1)
    assert (alone.sinks, alone.pre_rope) == (2, True)
    assert type(alone.key.quantizer_of(0)) is ExactQuantizer and alone.key.quantizer_of(1) == POLICY.key.quantizer
    exact, cache = model.new_cache(), model.new_cache(alone)
    for filled in (exact, cache):
        logits(model, ids, filled, [40])
    for layer in (0, 1):
        for found, wanted in zip(cache.read(layer), exact.read(layer), strict=True):
            assert torch.allclose(found, wanted, atol=1e-12) == (layer == 0)


def said(before, after):
    row = {"layer": 0, "flip_rate": 0.5, "flip_rate_low": 0.2, "flip_rate_high": 0.8, "kept": len(before)}
    exact = {"name": "exact", "kept": len(before), "tried": 9, "flip_rate": 0.0, "flip_rate_high": 0.1,
             "perplexity": 1.0}
    protocol = [share_avoided(name, 0, before, after, seed=0) for name in ("PCR", "recovery")]
    return findings({"rows": [exact], "layers": [row], "protocol": protocol})[-1]


@pytest.mark.parametrize(("broken", "then", "tells"), [
    (40, 2, True), (40, 40, False), (0, 0, False), (0, 5, False), (3, 2, False), (20, 10, True)])
def test_what_this_model_cannot_tell_is_said(broken, then, tells):
    """Of 40: everything broken either way, nothing broken before, or too few for an interval."""
    before, after = ([False] * n + [True] * (40 - n) for n in (broken, then))
    assert said(before, after).endswith("this model cannot tell.") != tells


def test_a_share_is_that_of_the_flips_and_its_interval_covers_it():
    generator = torch.Generator().manual_seed(0)
    before = (torch.rand(200, generator=generator) > 0.6).tolist()
    after = [keep or bool(torch.rand((), generator=generator) < 0.7) for keep in before]
    row = share_avoided("PCR", 3, before, after, seed=1)
    flips = before.count(False), after.count(False)
    assert row["value"] == pytest.approx(1 - flips[1] / flips[0]) and row["low"] < row["value"] < row["high"]
    assert (row["before"], row["after"], row["layer"]) == (flips[0] / 200, flips[1] / 200, 3)
    width = 2 * 1.96 * (row["value"] * (1 - row["value"]) / flips[0]) ** 0.5  # a binomial share of those before
    assert row["high"] - row["low"] == pytest.approx(width, rel=0.2)


# --- the methods, in small, on the real model

@pytest.mark.slow
def test_the_found_policies_cost_less_than_the_papers_and_the_order_of_channels_pays(loaded32):
    """512 tokens of the text that nothing was searched on; the sizes are left to the committed run."""
    model, tokenizer = loaded32
    run = Run(model, tokenizer, text_ids(tokenizer, prose("report"), 512, model))
    exact = log_losses(model, run.ids, model.new_cache())
    cost = {}
    for name in ("kivi-2", "kvquant-2", "rotatekv-2", "rotated alike, 2 bits", "found-2.5", "found-4.5"):
        policy = as_streamed(policies.get(CHOSEN[name], calibration=run.calibration))
        cost[name] = rise(log_losses(model, run.ids, model.new_cache(policy)), exact)[0]
    assert cost["found-4.5"] < cost["found-2.5"] < min(cost["kivi-2"], cost["kvquant-2"], cost["rotatekv-2"])
    assert cost["rotatekv-2"] < cost["rotated alike, 2 bits"] / 2
    assert abs(cost["found-4.5"]) < 2
