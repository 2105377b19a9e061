"""The general principle: measure the error of any tensor where it is consumed. Next file: `tables.py`."""

from functools import partial
from math import gcd

import torch
import torch.nn.functional as F
from torch import Tensor

from kvmini.attention import View, weighted_sum
from kvmini.errors import KvminiError
from kvmini.experiments.run import AXES, Result, Run
from kvmini.metrics import consumed_error, relative_error
from kvmini.phenomena import causal_weights, exact_layers, received
from kvmini.quantizers.uniform import UniformQuantizer

CORRUPTED = 256  # tokens of which one is lost


def principle(run: Run) -> Result:
    """Outside the KV cache, the gated activation before the down projection; inside it, one channel or token corrupted.

    Returns:
        rows: stored and consumed error in percent of that activation on each axis, mean over layers, and in how
        many layers the two prefer different axes; corrupted: `corrupted`.
    """
    tokens = run.ids.shape[1] // run.group_size * run.group_size
    if not tokens:
        raise KvminiError(f"a per_channel group needs {run.group_size} tokens, not {run.ids.shape[1]}: give more, or a "
                          "smaller group")
    width = run.model.layers[0].ffn.down.in_features
    group_sizes = {"per_token": gcd(run.group_size, width), "per_channel": run.group_size}  # a width need not divide
    found: list[dict[str, tuple[float, float]]] = []

    def before_down(down: torch.nn.Module, given: tuple[Tensor]) -> None:
        x, consumer = given[0][:, :tokens], partial(F.linear, weight=down.weight)
        found.append({axis: consumed_error(x, consumer, UniformQuantizer(run.n_bits, axis, group_sizes[axis]))
                      for axis in AXES})
    hooks = [layer.ffn.down.register_forward_pre_hook(before_down) for layer in run.model.layers]
    try:
        run.model(run.ids, last_only=True)
    finally:
        for hook in hooks:
            hook.remove()
    rows = [{"name": axis, "group_size": group_sizes[axis],
             "stored": sum(layer[axis][0] for layer in found) / len(found),
             "consumed": sum(layer[axis][1] for layer in found) / len(found)} for axis in AXES]
    stored, consumed = ([layer["per_token"][i] < layer["per_channel"][i] for layer in found] for i in (0, 1))
    differ = sum(a != b for a, b in zip(stored, consumed, strict=True))
    rows.append({"name": "layers where the two disagree", "layers": differ, "of": len(found)})
    return {"rows": rows, "corrupted": corrupted(run)}


def corrupted(run: Run) -> list[dict]:
    """The attention output's error when one channel or one token of K or V is set to zero, on the first 256 tokens.

    The channel with most energy, or the token with most attention: "most"; and the median one: "median".
    """
    layers = []

    def look(layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        rope = run.model.config.rope
        weights = causal_weights(q, k, rope)
        exact, Hkv = weighted_sum(weights, View(v)), k.shape[1]
        attention = received(weights).unflatten(1, (Hkv, -1)).mean(2)  # [B, Hkv, T]
        errors = {}
        for side, x in (("K", k), ("V", v)):
            for what, rank in (("channel", x.norm(dim=-2)), ("token", attention)):
                order = rank.argsort(-1, descending=True)
                for which, place in (("most", 0), ("median", order.shape[-1] // 2)):
                    mask = torch.zeros_like(rank, dtype=torch.bool).scatter(-1, order[..., place:place + 1], True)
                    lost = x.masked_fill(mask[..., None, :] if what == "channel" else mask[..., None], 0.0)
                    w = causal_weights(q, lost, rope) if side == "K" else weights
                    out = weighted_sum(w, View(lost if side == "V" else v))
                    errors[side, what, which] = relative_error(exact, out).mean().item()
        layers.append(errors)
    exact_layers(run.model, run.ids[:, :CORRUPTED], look)
    return [{"name": f"one {what} of {side}", "side": side, "lost": what} | {
        f"output_error_{which}": sum(errors[side, what, which] for errors in layers) / len(layers)
        for which in ("most", "median")} for side in ("K", "V") for what in ("channel", "token")]


def findings(result: Result) -> list[str]:
    token, channel, differ = result["rows"]
    lost = [f"{row['name']} {row['output_error_most']:.0f}% ({row['output_error_median']:.0f}%)"
            for row in result["corrupted"]]
    return [f"The gated activation before the down projection, per token / per channel: stored {token['stored']:.1f} / "
            f"{channel['stored']:.1f}%, consumed {token['consumed']:.1f} / {channel['consumed']:.1f}%; the two "
            f"prefer different axes in {differ['layers']} of {differ['of']} layers.",
            f"Attention output's error, first {CORRUPTED} tokens, when the strongest (the median) is set to zero: "
            f"{', '.join(lost)}."]
