"""Keys and values of every layer and head: errors stored and consumed, outlier channels, sparsity, sinks.

One exact run of the model, or one layer's tensors that a user brings. Next file: `experiments/sinks.py`.
"""

from collections.abc import Iterable

from torch import Tensor

from kvmini.cache import QuantizedKVCache
from kvmini.experiments.run import AXES, Result, Row, Run
from kvmini.metrics import ERRORS, elementwise, frobenius, head_errors
from kvmini.phenomena import (
    causal_weights,
    exact_layers,
    largest_channels,
    overlap,
    persistence,
    received,
    sparsity,
)
from kvmini.rope import Rope

THRESHOLDS = (1e-4, 1e-3, 1e-2)
LARGE = 4  # channels of a head that count as its large ones
SHOWN = 64  # tokens of the heat maps
MEASURES = {"": frobenius, "elementwise_": elementwise}


def heads(run: Run) -> Result:
    """`layer_result` of every layer of the model, prefill "all"."""
    layers: list[Result] = []
    with run.bar(run.model.config.n_layers, "layers") as bar:
        def look(layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
            layers.append(layer_result(run, layer, q, k, v, run.model.config.rope))
            bar.update()
        exact_layers(run.model, run.ids, look)
    return summary(layers)


def tensors(run: Run, q: Tensor, k: Tensor, v: Tensor, rope: Rope | None = None) -> Result:
    """The same for tensors of one layer from anywhere: unrotated with a `rope`, else as attention uses them."""
    return summary([layer_result(run, 0, q, k, v, rope or Unrotated())])


class Unrotated:
    """In place of a `Rope`: leaves queries and keys as they are."""

    def apply(self, x: Tensor, positions: range | Tensor) -> Tensor:
        return x


def layer_result(run: Run, layer: int, q: Tensor, k: Tensor, v: Tensor, rope: Rope) -> Result:
    """Rows of one layer.

    Shapes:
        q `[B, H, T, D]`, k and v `[B, Hkv, T, D]`, unrotated
    Returns:
        heads: one row per key/value head, errors in percent for each axis, sparsity, attention on the first
        token, the head's largest channel; channels: how fixed they are, before and after RoPE; heat: |k|.
    """
    Hkv, rotated = k.shape[1], rope.apply(k, range(k.shape[-2]))
    policies = [run.policy(axis, axis, "prefill=all") for axis in AXES]
    rows: list[Row] = [{"layer": layer, "head": head} for head in range(Hkv)]
    for prefix, measure in MEASURES.items():
        errors = head_errors(0, q, k, v, [QuantizedKVCache(1, rope, policy) for policy in policies], measure)
        for axis, of_axis in zip(AXES, errors, strict=True):
            for name, of_heads in zip(ERRORS, of_axis.tolist(), strict=True):
                for row, error in zip(rows, of_heads, strict=True):
                    row[f"{prefix}{name}_{axis}"] = error
    weights = causal_weights(q, k, rope)
    figures = {f"below_{threshold:g}": sparsity(weights, threshold) for threshold in THRESHOLDS}
    figures["first_token"] = received(weights)[..., 0]
    for name, figure in figures.items():  # [B, H]: the query heads of one key/value head are averaged
        for row, value in zip(rows, figure.double().unflatten(1, (Hkv, -1)).mean((0, 2)).tolist(), strict=True):
            row[name] = value
    channels = []
    for name, x in (("before RoPE", k), ("after RoPE", rotated)):
        n = min(LARGE, x.shape[-1])
        masks = largest_channels(x, n)
        channels.append({"name": name, "persistence": persistence(x, n).mean().item(),
                         "overlap": overlap(masks[0]) if Hkv > 1 else None, "chance": n / x.shape[-1]})
    for row, channel in zip(rows, largest_channels(rotated, 1)[0].int().argmax(-1).tolist(), strict=True):
        row["largest_channel"] = channel
    heat = [{"layer": layer, "head": head, "before": _magnitudes(k[0, head]), "after": _magnitudes(rotated[0, head])}
            for head in range(min(Hkv, 3))]
    return {"heads": rows, "channels": channels, "heat": heat}


def summary(layers: list[Result]) -> Result:
    """Means over heads, then layers: "rows" per axis, "sparsity" per threshold, "channels" before and after RoPE."""
    every = [row for layer in layers for row in layer["heads"]]

    def mean(rows: Iterable[Row], name: str) -> float | None:
        found = [row[name] for row in rows if row[name] is not None]
        return sum(found) / len(found) if found else None

    rows = [{"name": axis} | {f"{prefix}{name}": mean(every, f"{prefix}{name}_{axis}")
                              for prefix in MEASURES for name in ERRORS} for axis in AXES]
    thresholds = [{"threshold": threshold, "below": mean(every, f"below_{threshold:g}")} for threshold in THRESHOLDS]
    channels = [{"name": order["name"]} | {name: mean([layer["channels"][i] for layer in layers], name)
                                           for name in ("persistence", "overlap", "chance")}
                for i, order in enumerate(layers[0]["channels"])]
    return {"rows": rows, "sparsity": thresholds, "channels": channels, "heads": every,
            "heat": layers[len(layers) // 2]["heat"]}


def findings(result: Result) -> list[str]:
    token, channel = result["rows"]
    before, after = result["channels"]
    few, some, many = result["sparsity"]
    first = sum(row["first_token"] for row in result["heads"]) / len(result["heads"])
    return [error_finding(token, channel, ""), channel_finding(before, after),
            f"Of the causal attention weights {few['below']:.1%} are below {few['threshold']:g}, {some['below']:.1%} "
            f"below {some['threshold']:g}, {many['below']:.1%} below {many['threshold']:g}; the first token gets "
            f"{first:.0%} of all.",
            "Elementwise: p" + error_finding(token, channel, "elementwise_")[1:]]


def error_finding(token: Row, channel: Row, prefix: str) -> str:
    def pair(name: str) -> str:
        return f"{token[prefix + name]:.1f} / {channel[prefix + name]:.1f}"
    return (f"Per token / per channel, %: keys stored {pair('key_error')}, scores {pair('score_error')}; values stored "
            f"{pair('value_error')}, output {pair('output_error')}.")


def channel_finding(before: Row, after: Row) -> str:
    shared = "" if before["overlap"] is None else (
        f"; two heads of a layer share {before['overlap']:.0%} of them ({before['chance']:.0%} by chance)")
    return (f"Of each token's {LARGE} largest key channels {before['persistence']:.0%} are the head's own before RoPE, "
            f"{after['persistence']:.0%} after{shared}.")


def _magnitudes(x: Tensor) -> list[list[float]]:
    return [[float(f"{value:.3g}") for value in row] for row in x[:SHOWN].abs().tolist()]
