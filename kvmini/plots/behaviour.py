"""What a policy does over time and to the model's work: windows, being fooled, flips. Next file: `plots/memory.py`."""

from matplotlib.figure import Figure

from kvmini.experiments.principle import CORRUPTED
from kvmini.experiments.run import Result
from kvmini.experiments.windows import RESIDUALS
from kvmini.plots.style import DARK, INK, bars, line, panels


def residual(result: Result, title: str) -> Figure:
    """Recall, counting and perplexity against the length of the exact window."""
    figure, axes = panels(f"{title}, decoded (perplexity: streamed)", 4, 4, 4)
    exact, rows = result["rows"][0], result["rows"][1:1 + len(RESIDUALS)]
    lengths = [row["residual_length"] for row in rows]
    for panel, name, times in zip(axes, ("recall", "counting", "perplexity"), (100, 100, 1), strict=True):
        line(panel, lengths, [times * row[name] for row in rows], "quantized")
        if f"{name}_standard_error" in exact:
            panel.errorbar(lengths, [times * row[name] for row in rows], color=DARK, capsize=3, linestyle="none",
                           yerr=[1.96 * times * row[f"{name}_standard_error"] for row in rows])
        panel.axhline(times * exact[name], color=INK, linestyle="--", linewidth=1, label="exact")
        panel.set(xlabel="exact recent tokens", ylabel=name if times == 1 else f"{name}, % (bars: 95%)")
        panel.legend(fontsize=8)
    return figure


def timeline(result: Result, title: str) -> Figure:
    """Exact keys and values after each step, and the bytes of the cache."""
    figure, axes = panels(f"{title}: one layer, token by token", 4, 4, 4)
    exact, *rows = result["rows"]
    steps = range(1, len(exact["nbytes"]) + 1)
    for panel, name in zip(axes, ("exact_keys", "exact_values"), strict=False):
        for n, row in enumerate(rows):
            line(panel, steps, row[name], row["name"], n, markevery=64)
        panel.set(xlabel="tokens so far", ylabel=name.replace("_", " "))
    for n, row in enumerate((*rows, exact)):
        line(axes[2], steps, [x / 1024 for x in row["nbytes"]], row["name"], n, markevery=64)
    axes[2].set(xlabel="tokens so far", ylabel="cache of one layer, KiB (windows 16 bits)")
    axes[2].legend(fontsize=7)
    return figure


def modes(result: Result, title: str) -> Figure:
    """One policy's perplexity, by how it is measured."""
    figure, (panel,) = panels(title, 8)
    bars(panel, [row["name"] for row in result["rows"]],
         {"perplexity": [row["perplexity"] for row in result["rows"]]}, "%.1f")
    panel.set(ylabel="perplexity", title="The same policy, measured in five ways")
    return figure


def blind(result: Result, title: str) -> Figure:
    """Multiple choice beside recall."""
    figure, (panel,) = panels(f"{title}; prompts handed over, then decoded", 9)
    bars(panel, [row["name"] for row in result["rows"]],
         {name: [100 * row[key] for row in result["rows"]] for name, key in
          (("multiple choice, accuracy", "accuracy"), ("recall, tokens right", "recall"))})
    panel.axhline(25, color=INK, linestyle="--", linewidth=1)
    panel.annotate("chance of multiple choice", (0.995, 25), xycoords=("axes fraction", "data"), ha="right",
                   va="bottom", fontsize=8)
    panel.set(ylabel="%", title="Short multiple choice beside recall")
    return figure


def flips(result: Result, title: str) -> Figure:
    """Conditional flip rate with its interval, beside perplexity."""
    figure, (left, right) = panels(f"{title}; answers decoded, perplexity streamed", 5, 5)
    rows = [row for row in result["rows"][1:] if row["flip_rate"] is not None]
    names = [row["name"] for row in rows]
    bars(left, names, {"flip rate": [100 * row["flip_rate"] for row in rows]})
    left.errorbar(range(len(rows)), [100 * row["flip_rate"] for row in rows], color=INK, capsize=4, linestyle="none",
                  yerr=[[100 * (row["flip_rate"] - row["flip_rate_low"]) for row in rows],
                        [100 * (row["flip_rate_high"] - row["flip_rate"]) for row in rows]])
    left.set(ylabel="kept instructions that break, % (95%)", title="Flips")
    bars(right, names, {"perplexity": [row["perplexity"] for row in rows]}, "%.1f")
    right.axhline(result["rows"][0]["perplexity"], color=INK, linestyle="--", linewidth=1, label="exact")
    right.set(ylabel="perplexity", title="Perplexity")
    right.legend(fontsize=8)
    return figure


def principle(result: Result, title: str) -> Figure:
    """Stored against consumed outside the cache; one channel or token lost."""
    figure, (left, right) = panels(title, 4.5, 4.5)
    rows = result["rows"][:2]
    bars(left, ["stored", "after the down projection"],
         {row["name"]: [row["stored"], row["consumed"]] for row in rows}, "%.1f")
    left.set(ylabel="relative error, %", title="The gated activation")
    lost = result["corrupted"]
    bars(right, [row["name"] for row in lost],
         {which: [row[f"output_error_{which}"] for row in lost] for which in ("most", "median")}, "%.1f")
    right.set(ylabel="output error, %", title=f"Set to zero, first {CORRUPTED} tokens")
    return figure
