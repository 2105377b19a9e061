"""What the figures share: legible in greyscale, a title that says what ran. Next file: `plots/ablation.py`."""

from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure

DARK, LIGHT, INK = "#1f4e79", "#a9c7e8", "#222222"
STYLES = ((DARK, "o", "-"), (LIGHT, "s", "--"), ("#6b6b6b", "^", ":"), (INK, "D", "-."))  # colour, marker, line


def panels(title: str, *widths: float, height: float = 3.8) -> tuple[Figure, list[Axes]]:
    """A figure with one panel beside the other, each of a width in inches."""
    figure = Figure(figsize=(sum(widths), height), layout="constrained")
    figure.suptitle(title, fontsize=9)
    axes = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    return figure, list(axes)


def line(axes: Axes, x: list[float], y: list[float], label: str, n: int = 0, **more) -> None:
    """The n-th line of a panel; colour, marker and dashes all tell it from the others."""
    colour, marker, dashes = STYLES[n % len(STYLES)]
    axes.plot(x, y, dashes, color=colour, marker=marker, markeredgecolor=INK, markersize=5, label=label, **more)


def bars(axes: Axes, groups: list[str], series: dict[str, list[float]], form: str = "%.0f") -> None:
    """Groups of bars with their figures on top; one colour for each series."""
    width = 0.8 / len(series)
    for n, (label, heights) in enumerate(series.items()):
        places = [i + width * (n - (len(series) - 1) / 2) for i in range(len(groups))]
        colour = (LIGHT, DARK, "#6b6b6b", "white")[n % 4]
        drawn = axes.bar(places, heights, width, label=label.replace("_", " "), color=colour, edgecolor=INK)
        axes.bar_label(drawn, fmt=form, fontsize=8)
    axes.set_xticks(range(len(groups)), [fill(group.replace("_", " "), 16) for group in groups], fontsize=8)
    axes.legend(fontsize=8)
