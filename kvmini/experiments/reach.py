"""How little a cache can cost: policies found by search, beside the papers' own, on two texts with intervals.

The search ran on search.txt alone; here are report.txt (or --text) and the source of Python's argparse, which is no
prose. Every policy is judged against the exact cache token by token, so what is hard in a text cancels.
Next file: `experiments/calibrated.py`.
"""

import argparse
import inspect
from dataclasses import replace

from torch import Tensor

from kvmini.evaluate import log_losses
from kvmini.experiments.run import Result, Row, Run, as_streamed, bits, of_body, settings
from kvmini.policies import get
from kvmini.texts import text_ids

WINDOWS = "residual=128,sinks=4,pre-rope"
EVEN, LEAST_SQUARES, ALIKE = "even grid, 2 bits", "least squares, 2 bits", "rotated alike, 2 bits"
ROTATED = "hadamard+clipped+"
CHOSEN = {
    "kivi-2": "kivi-2", "kvquant-2": "kvquant-2", "rotatekv-2": "rotatekv-2", "innerq-hybrid": "innerq-hybrid",
    EVEN: f"k=per_channel:2:32,v=per_token:2:32,{WINDOWS}",
    LEAST_SQUARES: f"k=least_squares:per_channel:2:32,v=least_squares:per_token:2:32,{WINDOWS}",
    ALIKE: f"k={ROTATED}per_token:2:64,v={ROTATED}per_token:2:64,sinks=massive,pre-rope",
    "found-2.5": "found-2.5", "found-3": "found-3", "found-4.5": "found-4.5"}
PAPERS = ("kivi-2", "kvquant-2", "rotatekv-2", "innerq-hybrid")
LIMITS = {"found-2.5": 8, "found-3": 2, "found-4.5": 0.7}  # percent, of the mean over both texts


def reach(run: Run) -> Result:
    """The rise of the perplexity over the exact cache's, streamed, with its 95% interval.

    Returns:
        rows: one per policy: its bits, and for each text ("text", "code") and over both ("mean") the rise in percent
        and half its interval, `rise_..` and `half_..`; neighbouring tokens are taken as independent.
    """
    code = text_ids(run.tokenizer, inspect.getsource(argparse), run.ids.shape[1], run.model)
    chosen = {name: get(spelled, calibration=run.calibration) for name, spelled in CHOSEN.items()}
    chosen |= {name: policy for name, policy in run.policies.items() if name != "exact"}
    rows = [settings(name, as_streamed(policy)) for name, policy in chosen.items()]
    with run.bar(2 * len(rows) + 2) as bar:
        for text, of_text in (("text", run), ("code", replace(run, ids=code))):
            bar.set_description(f"exact, {text}")
            exact = log_losses(run.model, of_text.ids, run.model.new_cache())
            bar.update()
            for row, policy in zip(rows, chosen.values(), strict=True):
                bar.set_description(f"{row['name']}, {text}")
                cache = run.model.new_cache(as_streamed(policy))
                row[f"rise_{text}"], row[f"half_{text}"] = rise(log_losses(run.model, of_text.ids, cache), exact)
                row |= {} if text == "code" else bits(cache)
                bar.update()
    for row in rows:
        row["rise_mean"] = (row["rise_text"] + row["rise_code"]) / 2
        halves = row["half_text"], row["half_code"]
        row["half_mean"] = None if None in halves else (halves[0] ** 2 + halves[1] ** 2) ** 0.5 / 2
    return {"rows": rows}


def rise(losses: Tensor, exact: Tensor) -> tuple[float, float | None]:
    """Perplexity over the exact one's, less 1, in percent, and half its 95% interval: the paired difference of losses.

    Shapes:
        two of `[B, T]`, natural logarithms; a single one has no interval
    Example:
        >>> import torch
        >>> mean, half = rise(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[1.0, 2.0, 3.7]]))
        >>> round(mean, 1), round(half, 1)      # exp(0.1) - 1
        (10.5, 21.7)
    """
    off = (losses - exact).flatten().double()
    ratio = off.mean().exp().item()
    return 100 * (ratio - 1), 100 * ratio * 1.96 * (off.std() / len(off) ** 0.5).item() if len(off) > 1 else None


def findings(result: Result) -> list[str]:
    by_name = {row["name"]: row for row in result["rows"]}
    if by_name["kivi-2"]["half_mean"] is None:
        return ["Not measurable here: 1 token has no interval."]

    def said(name: str) -> str:
        row = by_name[name]
        return (f"{name} ({of_body(row)}) {row['rise_text']:+.1f}% ± {row['half_text']:.1f} and "
                f"{row['rise_code']:+.1f}% ± {row['half_code']:.1f}, mean "
                f"{row['rise_mean']:+.2f}% ± {row['half_mean']:.2f}")
    said_of_found = [f"{said(name)}: at most +{limit}% {held(by_name[name], limit)}." for name, limit in LIMITS.items()]
    return [*said_of_found, f"{'; '.join(map(said, PAPERS))}.",
            "A grid of least squares, whose stored error is lower, "
            f"{verdict(by_name, EVEN, LEAST_SQUARES)} perplexity: {said(LEAST_SQUARES)}; {said(EVEN)}.",
            "Sorting each head's channels by calibration, beside one rotation for all heads alone, "
            f"{verdict(by_name, ALIKE, 'rotatekv-2')} perplexity: {said('rotatekv-2')}; {said(ALIKE)}."]


def held(row: Row, limit: float) -> str:
    """Whether the mean of both texts is at most the limit, so far as its interval can say."""
    low, high = (row["rise_mean"] + sign * row["half_mean"] for sign in (-1, 1))
    return "holds" if high <= limit else "does not hold" if low > limit else "is open, for its interval spans it"


def verdict(by_name: dict[str, Row], before: str, after: str) -> str:
    """What a change does, beyond the noise of both."""
    gap = by_name[after]["rise_mean"] - by_name[before]["rise_mean"]
    noise = (by_name[after]["half_mean"] ** 2 + by_name[before]["half_mean"] ** 2) ** 0.5
    return "raises" if gap > noise else "lowers" if gap < -noise else "does not measurably change"
