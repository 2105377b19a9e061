"""The frontier on one page: every method through the same cache, on the same model, its bits counted from its bytes.

Next file: `experiments/reach.py`.
"""

import time
from statistics import median

import torch

from kvmini.cache import KVCache
from kvmini.experiments.flips import answered, kept_instructions, rates
from kvmini.experiments.run import (
    Result,
    Run,
    as_streamed,
    of_body,
    perplexity_and_bits,
    recall_and_counting,
    settings,
)
from kvmini.policies import get

SHOWN = ("kivi-2", "kivi-4", "kvquant-2", "kvquant-3", "kvquant-4", "rotatekv-2", "rotatekv-3", "rotatekv-4",
         "innerq-small", "innerq-hybrid", "innerq-base", "xquant-2", "xquant-4", "xquant-svd-2", "xquant-svd-4",
         "fp8-e4m3", "fp8-e5m2", "found-2.5", "found-3", "found-4.5")
INSTRUCTIONS, COUNTED = 40, 30  # for each of so many policies, fewer than elsewhere
STEPS = 5  # decode steps that are timed, after one that is not


def frontier(run: Run) -> Result:
    """Bits, perplexity, recall, counting, flips and the time of a decode step, for each method's own recipe.

    Returns:
        rows: exact, then one per policy, fewest bits first; step_ratio is the median time of a step over the whole
        text, to that of the exact cache: of the path that dequantizes before it attends, not of a kernel.
    """
    chosen = {"exact": None} | {name: get(name, calibration=run.calibration) for name in SHOWN}
    chosen |= {name: policy for name, policy in run.policies.items() if name != "exact"}
    rows = [settings(name, as_streamed(policy)) for name, policy in chosen.items()]
    with run.bar(4 * len(rows) + 1, "instructions") as bar:
        for row, policy in zip(rows, chosen.values(), strict=True):
            bar.set_description(f"perplexity, {row['name']}")
            cache = run.model.new_cache(as_streamed(policy))
            row |= perplexity_and_bits(run, policy, cache=cache) | {"step_ms": 1000 * step_seconds(run, cache)}
            bar.update()
        recall_and_counting(run, rows, list(chosen.values()), bar, COUNTED)
        bar.set_description("flips")
        kept, tried = kept_instructions(run, INSTRUCTIONS)
        bar.update()
        for row, keeps in zip(rows, answered(run, kept, list(chosen.values())), strict=True):
            row |= rates(keeps) | {"tried": tried}
            bar.update()
    for row in rows:
        row["step_ratio"] = row["step_ms"] / rows[0]["step_ms"]
        row["perplexity_ratio"] = row["perplexity"] / rows[0]["perplexity"]
    rows[1:] = sorted(rows[1:], key=lambda row: row["body_bits_per_element"] or 0)
    return {"rows": rows}


@torch.no_grad()
def step_seconds(run: Run, cache: KVCache) -> float:
    """The median time of a decode step at the end of what the cache holds; it is cropped first, to stay in context."""
    cache.crop(cache.length - STEPS - 1)
    seconds = []
    for token in run.ids[:, -STEPS - 1:].split(1, dim=1):
        started = time.perf_counter()
        run.model(token, cache, last_only=True)
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:])


def findings(result: Result) -> list[str]:
    """The Pareto front, one sentence; then each method's family beside the exact cache."""
    front = pareto(result)
    said = ", ".join(f"{row['name']} ({of_body(row)}, {row['perplexity_ratio'] - 1:+.1%})" for row in front)
    return [f"No other policy here has both fewer bits of the body and a lower perplexity: {said}.",
            *(" ".join(of_method(result, method)) for method in METHODS)]


METHODS = {"KVQuant": "kvquant", "RotateKV": "rotatekv", "InnerQ": "innerq", "XQuant": "xquant", "FP8": "fp8"}


def of_method(result: Result, method: str) -> list[str]:
    """What each recipe of a method costs here."""
    return [f"{row['name']}: {of_body(row)}, perplexity {row['perplexity_ratio'] - 1:+.1%}, "
            f"recall {row['recall']:.0%}, {flipped(row)}, a step {row['step_ratio']:.1f} times exact."
            for row in result["rows"] if row["name"].startswith(METHODS[method])]


def flipped(row: dict) -> str:
    return f"flips {row['flip_rate']:.0%}" if row["kept"] else "no instruction kept"


def pareto(result: Result) -> list[dict]:
    """The rows with something stored that no other beats in both bits and perplexity, fewest bits first."""
    front, best = [], float("inf")
    stored = [row for row in result["rows"] if row["body_bits_per_element"]]
    for row in sorted(stored, key=lambda row: (row["body_bits_per_element"], row["perplexity"])):
        if row["perplexity"] < best:
            front.append(row)
            best = row["perplexity"]
    return front
