"""The streaming tax: what the recent window holds, what it gives, and how to measure it without being fooled.

Next file: `experiments/blind.py`.
"""

from dataclasses import replace

from torch import Tensor

from kvmini.cache import QuantizedKVCache
from kvmini.experiments.run import Result, Run, as_streamed, perplexity_and_bits, recall_and_counting, settings
from kvmini.phenomena import exact_layers
from kvmini.store import QuantizedStore

RESIDUALS = (0, 16, 32, 64, 128)


def residual(run: Run) -> Result:
    """Two generation tasks through the cache, against the length of the exact window: verbatim recall, and counting.

    Returns:
        rows: exact, then one per length; shares of right answer tokens (counting: up to the first wrong one) with
        their standard errors over items; the perplexity of the text, streamed.
    """
    chosen = {"exact": None} | {f"residual {n}": run.policy("per_channel", "per_token", f"residual={n}")
                                for n in RESIDUALS}
    chosen |= {name: policy for name, policy in run.policies.items() if name != "exact"}
    rows = [settings(name, as_streamed(policy)) for name, policy in chosen.items()]
    with run.bar(3 * len(rows)) as bar:
        recall_and_counting(run, rows, list(chosen.values()), bar)
        for row, policy in zip(rows, chosen.values(), strict=True):
            bar.set_description(f"perplexity, {row['name']}")
            row.update(perplexity_and_bits(run, as_streamed(policy)))
            bar.update()
    return {"rows": rows}


def residual_findings(result: Result) -> list[str]:
    exact, windows = result["rows"][0], result["rows"][1:1 + len(RESIDUALS)]
    none, most = windows[0], windows[-1]

    def shares(task: str) -> str:
        of = [row[task] for row in (exact, most, none)]
        error = max(row[f"{task}_standard_error"] for row in windows)
        return " / ".join(f"{100 * x:.0f}" for x in of) + f" (± {100 * error:.0f})"
    return [f"Exact / window of {most['residual_length']} / none, %: recall {shares('recall')}, counting "
            f"{shares('counting')}; perplexity {exact['perplexity']:.1f} / {most['perplexity']:.1f} / "
            f"{none['perplexity']:.1f}."]


def timeline(run: Run) -> Result:
    """How many tokens are exact after each step, and the bytes of the cache: one layer's real keys and values.

    Returns:
        rows: one per policy, with lists over the number of tokens: exact_keys, exact_values, nbytes; the exact
        cache's bytes first. Windows count at 16 bits.
    """
    first: list[tuple[Tensor, Tensor]] = []
    exact_layers(run.model, run.ids, lambda layer, q, k, v: first or first.append((k, v)))
    k, v = first[0]
    flush = max(1, 128 // run.group_size) * run.group_size  # 128 itself, where groups of that size fill it
    chosen = {"KIVI: R = 128": run.policy("per_channel", "per_token", f"k-flush={flush},v-residual=128"),
              "R = 128, groups as they fill": run.policy("per_channel", "per_token", "residual=128"),
              "no window": run.policy("per_channel", "per_token")}
    rows = [{"name": "exact", "exact_keys": None, "exact_values": None,
             "nbytes": [2 * 2 * k[:, :, :n].numel() for n in range(1, k.shape[-2] + 1)]}]
    for name, policy in chosen.items():
        cache = QuantizedKVCache(1, run.model.config.rope, policy)
        row: dict = {"name": name, "exact_keys": [], "exact_values": [], "nbytes": []}
        for t in range(k.shape[-2]):
            cache.append(0, k[..., t:t + 1, :], v[..., t:t + 1, :])
            row["exact_keys"].append(_n_exact(cache.keys[0]))
            row["exact_values"].append(_n_exact(cache.values[0]))
            row["nbytes"].append(round(cache.bits_per_element_at(16) * 2 * k[..., :t + 1, :].numel() / 8))
        late = k.shape[-2] // 2  # once the window has filled
        for side in ("keys", "values"):
            exact = row[f"exact_{side}"][late:]
            row |= {f"fewest_{side}": min(exact), f"most_{side}": max(exact)}
        rows.append(row)
    for row in rows:
        row["last_nbytes"] = row["nbytes"][-1]
    return {"rows": rows}


def _n_exact(store: QuantizedStore) -> int:
    return sum(x.shape[-2] for x in store.exact_tensors)


def timeline_findings(result: Result) -> list[str]:
    exact, *rows = result["rows"]
    return [f"{row['name']}: {row['fewest_keys']} to {row['most_keys']} exact keys, {row['fewest_values']} to "
            f"{row['most_values']} exact values; at {len(row['nbytes'])} tokens "
            f"{exact['last_nbytes'] / row['last_nbytes']:.1f} times smaller than exact." for row in rows]


def modes(run: Run) -> Result:
    """The perplexity of one policy, measured in five ways: in one call three times, and decoded in chunks."""
    policy = run.policy("per_channel", "per_token")
    ways = {"exact": (None, None), "one call, exact": ("exact", None), "one call, all": ("all", None),
            "one call, streamed": ("streamed", None), "decoded, 32 at a time": ("exact", 32),
            "decoded, 1 at a time": ("exact", 1)}
    rows = []
    with run.bar(len(ways)) as bar:
        for name, (prefill, chunk) in ways.items():
            bar.set_description(name)
            chosen = prefill and replace(policy, prefill=prefill)
            rows.append(settings(name, chosen) | {"chunk": chunk} | perplexity_and_bits(run, chosen, chunk))
            bar.update()
    return {"rows": rows}


def modes_findings(result: Result) -> list[str]:
    by_name = {row["name"]: row["perplexity"] for row in result["rows"]}
    blind, everything, streamed, by_32, by_1 = (f"{perplexity:.1f}" for perplexity in list(by_name.values())[1:])
    return [f"The same policy: {blind} in one call that sees nothing stored (exact {by_name['exact']:.1f}), "
            f"{everything} where it sees everything stored, {streamed} streamed; really decoded {by_1} one token at "
            f"a time, {by_32} in chunks of 32."]
