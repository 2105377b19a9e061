"""The frontier as a picture: bits against quality; and what was found, what a layer breaks, what calibration sees.

Next file: `catalogue.py`.
"""

from matplotlib.figure import Figure

from kvmini.experiments.frontier import METHODS, pareto
from kvmini.experiments.run import Result
from kvmini.plots.style import DARK, INK, LIGHT, bars, line, panels

MARKERS = "os^Dvp*XP"


def frontier(result: Result, title: str) -> Figure:
    """Bits of the body against the rise of perplexity, and against recall; the Pareto front as a line."""
    figure, (left, right) = panels(title, 6.5, 4.5, height=4.4)
    families = [*METHODS.values(), "kivi", "found"]
    for row in (row for row in result["rows"] if row["body_bits_per_element"]):
        family = next((i for i, name in enumerate(families) if row["name"].startswith(name)), len(families))
        look = {"marker": MARKERS[family], "color": DARK if row["name"].startswith("found") else LIGHT,
                "markeredgecolor": INK, "linestyle": "none"}
        at = row["body_bits_per_element"]
        for axes, y in ((left, 100 * (row["perplexity_ratio"] - 1)), (right, 100 * row["recall"])):
            axes.plot(at, y, **look)
            axes.annotate(row["name"], (at, y), xytext=(4, 3), textcoords="offset points", fontsize=6)
    front = pareto(result)
    left.plot([row["body_bits_per_element"] for row in front], [100 * (row["perplexity_ratio"] - 1) for row in front],
              color=INK, linestyle="--", linewidth=1)
    left.set(yscale="symlog", xlabel="bits per element of the body", ylabel="perplexity over exact, % (symlog)",
             title="Quality against bits; dashed: Pareto front")
    right.axhline(100 * result["rows"][0]["recall"], color=INK, linestyle="--", linewidth=1)
    right.set(xlabel="bits per element of the body", ylabel="recall, %", title="Verbatim recall; dashed: exact")
    return figure


def reach(result: Result, title: str) -> Figure:
    """The rise on both texts, with intervals."""
    figure, (axes,) = panels(title, 9)
    rows = result["rows"]
    bars(axes, [row["name"] for row in rows],
         {text: [row[f"rise_{text}"] for row in rows] for text in ("text", "code")}, "%.1f")
    for n, text in enumerate(("text", "code")):
        axes.errorbar([i + 0.4 * (n - 0.5) for i in range(len(rows))], [row[f"rise_{text}"] for row in rows],
                      [row[f"half_{text}"] or 0 for row in rows], fmt="none", ecolor=INK, capsize=2, linewidth=1)
    axes.set(ylabel="perplexity over exact, %", title="With 95% intervals")
    axes.tick_params(axis="x", labelsize=6)
    return figure


def layers(result: Result, title: str) -> Figure:
    """Flips with one layer quantized at a time."""
    figure, (axes,) = panels(title, 7)
    rows = [row for row in result["layers"] if row["flip_rate"] is not None]
    for row in rows:
        ends = [100 * row["flip_rate_low"], 100 * row["flip_rate_high"]]
        axes.plot([row["layer"]] * 2, ends, color=LIGHT, linewidth=3)
    line(axes, [row["layer"] for row in rows], [100 * row["flip_rate"] for row in rows], "flip rate, Wilson interval")
    axes.set(xlabel="the one layer that is quantized", ylabel="instructions broken, %", title="One layer at a time")
    axes.legend(fontsize=8)
    return figure


def calibrated(result: Result, title: str) -> Figure:
    """Outliers here of thresholds from calibration text, and how uneven channels are."""
    figure, (left, right) = panels(title, 5, 5)
    at = [row["layer"] for row in result["rows"]]
    line(left, at, [100 * row["outside"] for row in result["rows"]], "of this text's keys")
    left.set(xlabel="layer", ylabel="outside of the thresholds, %", title="Outliers")
    line(right, at, [row["widest_channel"] for row in result["rows"]], "widest channel of K")
    right.set(xlabel="layer", ylabel="times the median channel", title="How uneven channels are", yscale="log")
    return figure
