"""Groups, heads, channels, sinks, massive activations, the order of RoPE: what is inside the tensors.

Next file: `plots/behaviour.py`.
"""

from matplotlib.figure import Figure

from kvmini.experiments.run import AXES, Result
from kvmini.experiments.sinks import SINKS
from kvmini.metrics import ERRORS
from kvmini.plots.style import DARK, INK, LIGHT, bars, line, panels


def groups(result: Result, title: str) -> Figure:
    """The error of a group's ordinary elements against its outlier; the model's groups with and without one."""
    figure, (left, right) = panels(title, 4, 6)
    rows = result["rows"]
    line(left, [max(row["outlier"], 1) for row in rows], [row["error"] for row in rows], "the other elements")
    left.set(xscale="log", xlabel="outlier, times the others' deviation (1: none)", ylabel="relative error, %",
             title="One group")
    bars(right, [row["name"] for row in result["model"]], {"keys, rotated": [row["error"] for row in result["model"]]})
    right.set(ylabel="relative error of the other elements, %", title="The model's keys")
    return figure


def errors(result: Result, title: str) -> Figure:
    """Stored beside consumed, for both axes: the relative error, and KIVI's elementwise one."""
    figure, axes = panels(f"{title}, prefill all", 5, 5)
    names = ["keys, stored", "keys, consumed (weights)", "values, stored", "values, consumed (output)"]
    for panel, prefix, what in zip(axes, ("", "elementwise_"), ("relative (norms)", "elementwise (rms, guarded)"),
                                   strict=True):
        bars(panel, names, {row["name"]: [row[prefix + error] for error in ERRORS]
                            for row in result["rows"]})
        panel.set(ylabel="error, %", title=what)
    return figure


def channels(result: Result, title: str) -> Figure:
    """|k|, tokens by channels, of a layer's first heads, before and after RoPE."""
    heat = result["heat"]
    figure = Figure(figsize=(3.2 * len(heat), 6), layout="constrained")
    what = f"|key|, layer {heat[0]['layer']}, first {len(heat[0]['before'])} tokens, exact"
    figure.suptitle(f"{title}: {what}", fontsize=9)
    grid = figure.subplots(2, len(heat), squeeze=False)
    for column, head in zip(grid.T, heat, strict=True):
        brightest = max(max(map(max, head[order])) for order in ("before", "after"))
        for panel, order in zip(column, ("before", "after"), strict=True):
            image = panel.imshow(head[order], aspect="auto", cmap="Greys", vmin=0, vmax=brightest)
            panel.set(xlabel="channel", ylabel="token", title=f"head {head['head']}, {order} RoPE")
        figure.colorbar(image, ax=column, shrink=0.6, label="|k|")
    return figure


def sparsity(result: Result, title: str) -> Figure:
    """Share of the causal attention weights below each threshold; attention on the first token by layer."""
    figure, (left, right) = panels(f"{title}, exact", 4, 5)
    rows = result["sparsity"]
    shares = [100 * row["below"] for row in rows]
    bars(left, [f"{row['threshold']:g}" for row in rows], {"weights below": shares}, "%.1f")
    left.set(xlabel="threshold", ylabel="causal weights below, %", title="Sparsity")
    layers = sorted({row["layer"] for row in result["heads"]})
    shares = [[row["first_token"] for row in result["heads"] if row["layer"] == layer] for layer in layers]
    line(right, layers, [100 * sum(share) / len(share) for share in shares], "first token")
    right.set(xlabel="layer", ylabel="attention on the first token, %", title="The sink", ylim=(0, 100))
    return figure


def sinks(result: Result, title: str) -> Figure:
    """Output error and perplexity against exact sinks; attention against the norm of values; the synthetic case."""
    figure, (left, middle, right) = panels(f"{title}, streamed", 4, 4, 4.5)
    by_name = {row["name"]: row for row in result["rows"]}
    for n, axis in enumerate(AXES):
        errors = [by_name[f"V {axis}, sinks {count}"]["output_error"] for count in SINKS]
        line(left, range(len(SINKS)), errors, f"V {axis.replace('_', ' ')}", n)
    left.set_xticks(range(len(SINKS)), SINKS)
    left.set(xlabel="first tokens kept exact", ylabel="output error, %", title="Output error against sinks", ylim=0)
    left.legend(fontsize=8)
    attention, norm = result["tokens"]["attention"], result["tokens"]["norm"]
    middle.scatter(attention[1:], norm[1:], s=8, color=LIGHT, edgecolor=INK, linewidth=0.3, label="other tokens")
    middle.scatter(attention[:1], norm[:1], s=60, color=DARK, marker="D", label="first token")
    middle.set(xscale="log", xlabel="attention received, share of a query's", ylabel="|value|, times the median",
               title="Attention and value norms")
    middle.legend(fontsize=8)
    rows = result["synthetic"]
    shares = sorted({row["share"] for row in rows})
    bars(right, [f"{share:.0%}" for share in shares],
         {f"V {axis}": [row["output_error"] for row in rows if row["value_axis"] == axis]
          for axis in AXES})
    right.set(xlabel="attention on a short sink", ylabel="output error, % (log)", yscale="log", title="Synthetic")
    return figure


def massive(result: Result, title: str) -> Figure:
    """Largest magnitude of the residual stream over its median, by layer; perplexity without it."""
    figure, (left, right) = panels(f"{title}, exact", 5, 5.5)
    rows = result["rows"]
    line(left, [row["layer"] for row in rows], [row["ratio"] for row in rows], "largest / median")
    left.axhline(1000, color=INK, linestyle="--", linewidth=1, label="1,000 times")
    left.set(xlabel="layer", ylabel="|h|, times the median (log)", yscale="log", title="Massive activations")
    left.legend(fontsize=8)
    effects = result["effects"]
    bars(right, [row["name"] for row in effects], {"perplexity": [row["perplexity"] for row in effects]}, "%.1f")
    right.set(ylabel="perplexity (log)", yscale="log", title="Without them")
    return figure


def rope(result: Result, title: str) -> Figure:
    """Stored and score error of both key axes, before RoPE and after."""
    figure, axes = panels(f"{title}, streamed", 4, 4, 4)
    what = {"key_error": "stored error, %", "score_error": "score error, %", "perplexity": "perplexity"}
    for panel, (name, label) in zip(axes, what.items(), strict=True):
        rows = result["rows"]
        bars(panel, list(AXES),
             {order: [row[name] for row in rows if row["pre_rope"] == (order == "pre-RoPE")]
              for order in ("pre-RoPE", "post-RoPE")}, "%.1f")
        panel.set(ylabel=label, xlabel="key axis")
    return figure
