"""Weights and cache as a picture. Next file: `plots/frontier.py`."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from kvmini.experiments.run import Result
from kvmini.plots.style import DARK, INK, LIGHT, line, panels

GIB = 2**30


def memory(result: Result, title: str) -> Figure:
    """Shares of weights and exact cache; bytes of each cache against context; the largest batch that fits.

    No model ran, so the title is made of the rows.
    """
    rows, fits = result["rows"], result["fits"]
    first, budget = rows[0], fits[0]["budget_bytes"] / GIB
    contexts = sorted({row["context"] for row in rows})
    what = f"{first['model']}, {fits[0]['weight_bits']:g}-bit weights, batch {first['batch']}"
    figure, (shares, sizes, batches) = panels(what, 3.6, 4.4, 4.0)

    exact = [row for row in rows if row["name"] == "exact"]
    places, weights = range(len(exact)), [row["weight_share"] for row in exact]
    shares.bar(places, weights, 0.75, label="weights", color=LIGHT, edgecolor=INK)
    shares.bar(places, [row["cache_share"] for row in exact], 0.75, weights, label="exact cache", color=DARK,
               edgecolor=INK, hatch="//")
    for place, share in enumerate(weights):
        shares.annotate(f"{share:.0f}", (place, min(share, 93)), ha="center", va="bottom", fontsize=8,
                        xytext=(0, 1), textcoords="offset points",
                        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    shares.set_xticks(places, [_short(n) for n in contexts])
    shares.set(xlabel="context, tokens", ylabel="share of memory, %", ylim=(0, 100), title="Weights and exact cache")
    shares.legend(fontsize=8, loc="lower left", framealpha=1)

    sizes.axhline(first["weight_bytes"] / GIB, color=INK, linewidth=1, label="weights")
    sizes.axhline(budget, color=INK, linewidth=1, linestyle=(0, (1, 3)), label=f"budget: {budget:g} GiB")
    for n, name in enumerate(row["name"] for row in fits):
        line(sizes, contexts, [row["cache_bytes"] / GIB for row in rows if row["name"] == name], f"cache, {name}", n)
    _contexts(sizes, contexts)
    sizes.set(ylabel="GiB (log scale)", title="Cache against weights")
    sizes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    sizes.legend(fontsize=8)

    largest = {row["name"]: {n: row[f"largest_batch_{n}"] for n in contexts if row[f"largest_batch_{n}"]}
               for row in fits}
    for n, (name, fitting) in enumerate(largest.items()):
        line(batches, list(fitting), list(fitting.values()), name, n)
    _contexts(batches, contexts)
    if not any(largest.values()):
        batches.set_ylim(1, 10)
        batches.text(0.5, 0.5, "not one sequence fits", transform=batches.transAxes, ha="center")
    batches.set(ylabel="largest batch (log scale)", title=f"What fits {budget:g} GiB with the weights")
    batches.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    batches.legend(fontsize=8)
    return figure


def _contexts(axes: Axes, contexts: list[int]) -> None:
    axes.set(xscale="log", yscale="log", xlabel="context, tokens (log scale)")
    axes.set_xlim(contexts[0] / 1.5, contexts[-1] * 1.5)
    axes.xaxis.set_major_locator(FixedLocator(contexts))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _short(round(x))))
    axes.yaxis.set_major_locator(LogLocator(10))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _short(n: int) -> str:
    """512, 2K, 1M: K is 2^10 and M is 2^20."""
    return f"{n >> 20}M" if n >= 2**20 else f"{n >> 10}K" if n >= 2**10 else f"{n}"
