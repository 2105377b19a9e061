"""The headline as a picture. Next file: `plots/phenomena.py`."""

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from kvmini.experiments.ablation import ADDED, STREAMED
from kvmini.experiments.run import AXIS_CHOICES, Result
from kvmini.plots.style import DARK, INK, LIGHT


def ablation(result: Result, title: str) -> Figure:
    """Perplexity of the four axis choices and of what is added; stored against consumed errors of both sides."""
    by_name = {row["name"]: row for row in result["rows"]}
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    figure.suptitle(f"{title}; axis choices: prefill all, light bars: streamed", fontsize=9)

    names = [f"K {key} V {value}" for key, value in AXIS_CHOICES]
    names = [*sorted(names, key=lambda name: -by_name[name]["perplexity"]), STREAMED, *ADDED]
    heights = [by_name[name]["perplexity"] for name in names]
    colours = [LIGHT if name in (STREAMED, *ADDED) else DARK for name in names]
    bars = left.barh([name.replace("_", " ") for name in names], heights, color=colours, edgecolor=INK)
    left.bar_label(bars, [f"{height:.1f}" for height in heights], padding=3, fontsize=8)
    exact = by_name["exact"]["perplexity"]
    left.axvline(exact, color=INK, linestyle="--", linewidth=1, label=f"exact: {exact:.1f}")
    left.set(xscale="log", xlabel="perplexity (log scale; lower is better)", title="Same bits, different axes")
    left.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.xaxis.set_major_formatter(ScalarFormatter())
    left.xaxis.set_minor_formatter(NullFormatter())
    left.set_xlim(exact * 0.8, max(heights) * 1.5)
    left.invert_yaxis()
    left.legend(loc="lower right", fontsize=8)

    token, channel = by_name["K per_token V per_token"], by_name["K per_channel V per_channel"]
    labels = ["keys,\nstored", "keys, consumed\n(attention weights)", "values,\nstored", "values, consumed\n(output)"]
    errors = ["key_error", "score_error", "value_error", "output_error"]
    for row, name, offset, colour in ((token, "per token", -0.2, LIGHT), (channel, "per channel", 0.2, DARK)):
        bars = right.bar([i + offset for i in range(4)], [row[error] for error in errors], 0.4, label=name,
                         color=colour, edgecolor=INK)
        right.bar_label(bars, fmt="%.0f", fontsize=8)
    right.set_xticks(range(4), labels, fontsize=8)
    right.set(ylabel="relative error, %", title="Stored against consumed")
    right.legend(fontsize=8)
    return figure
