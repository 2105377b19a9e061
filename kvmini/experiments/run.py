"""What every experiment is given, and what it gives back.

An experiment is a function from a `Run` to a `Result`: lists of rows, the main one named "rows". A row is a
dict with the keys of the JSON files. Beside it stands `findings`, from the result to sentences, the most
telling first; every figure and every verdict in them is computed from the rows. `plots` draws a result;
`catalogue.py` lists them all. Next file: `experiments/ablation.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kvmini.cache import KVCache
from kvmini.calibration import PASSAGE, Calibration, calibrate
from kvmini.evaluate import counting, counting_items, perplexity, recall, recall_items
from kvmini.metrics import ERRORS, errors
from kvmini.model import Llama
from kvmini.policies import Policy, get
from kvmini.texts import prose
from kvmini.tokenizer import Tokenizer

Row = dict[str, Any]
Result = dict[str, Any]  # "rows", and further lists of rows
AXES = ("per_token", "per_channel")
CALIBRATED_ON = 4 * PASSAGE  # tokens of calibration.txt
RECALLED, COUNTED = 20, 60  # tokens of each recall answer that are asked for beside counting; items of counting
AXIS_CHOICES = tuple((key, value) for key in AXES for value in AXES)


@dataclass(frozen=True)
class Run:
    """A model, a text `ids` of shape `[1, T]`, and the settings that all experiments share."""

    model: Llama
    tokenizer: Tokenizer
    ids: Tensor
    n_bits: int = 2
    group_size: int = 32
    seed: int = 0
    policies: dict[str, Policy | None] = field(default_factory=dict)  # asked for by name, besides the usual ones
    progress: bool = False
    given_calibration: Calibration | None = None

    @property
    def calibration(self) -> Calibration:
        """The one given, or the model's on calibration.txt, made when it is first asked for."""
        return self.given_calibration or calibration_of(self.model, self.tokenizer)

    def policy(self, key: str, value: str, more: str = "") -> Policy:
        """The uniform quantizer on these two axes, at this run's bits and groups; `more` as policies are spelled."""
        return get(f"k={key}:{self.n_bits}:{self.group_size},v={value}:{self.n_bits}:{self.group_size}"
                   + (more and f",{more}"))

    def bar(self, total: int, what: str = "") -> tqdm:
        """A progress bar; silent unless progress is wanted and somebody watches."""
        return tqdm(total=total, desc=what, leave=False, disable=None if self.progress else True)


@lru_cache(maxsize=1)
def calibration_of(model: Llama, tokenizer: Tokenizer) -> Calibration:
    """A model's calibration on the project's own text for it."""
    ids = tokenizer.encode(prose("calibration"))[:CALIBRATED_ON]
    return calibrate(model, torch.tensor([ids]), min(PASSAGE, model.config.context_length))


def settings(name: str, policy: Policy | None) -> Row:
    """A row with its settings filled in and the common figures still None."""
    row = dict.fromkeys(("name", "key_axis", "value_axis", "residual_length", "sink_length", "pre_rope", "prefill",
                         "body_bits_per_element", "bits_per_element", "bits_per_element_16bit_windows", "perplexity",
                         "recall", "recall_standard_error", *ERRORS))
    row["name"] = name
    if policy is not None:
        row |= {f"{side}_axis": getattr(policy.sides[side].quantizer, "axis", None)
                for side in ("key", "value") if side in policy.sides}
        row |= {"residual_length": max(side.residual_length for side in policy.sides.values()),
                "sink_length": policy.sinks, "pre_rope": policy.pre_rope, "prefill": policy.prefill}
    return row


def as_streamed(policy: Policy | None) -> Policy | None:
    """The policy as one call can judge it: with prefill "exact" that call would see nothing quantized."""
    return replace(policy, prefill="streamed") if policy and policy.prefill == "exact" else policy


def perplexity_and_bits(run: Run, policy: Policy | None, chunk: int | None = None,
                        cache: KVCache | None = None) -> Row:
    """Perplexity of the text through the policy, and the bits per element of the cache that it fills.

    The cache is a new one, unless an empty one of that policy is given.
    """
    cache = run.model.new_cache(policy) if cache is None else cache
    return {"perplexity": perplexity(run.model, run.ids, cache, chunk)} | bits(cache)


def bits(cache: KVCache) -> Row:
    """Bits per element of what a cache holds: of the packed part, as held, and were windows 16 bits wide."""
    return {"body_bits_per_element": cache.body_bits_per_element,
            "bits_per_element": cache.bits_per_element,
            "bits_per_element_16bit_windows": cache.bits_per_element_at(window_bits=16)}


def of_body(row: Row) -> str:
    """A row's bits of the packed part in words; all of a short text may be in a window.

    Example:
        >>> of_body({"body_bits_per_element": 3.0}), of_body({"body_bits_per_element": None})
        ('3.00 bits', 'nothing stored')
    """
    stored = row["body_bits_per_element"]
    return "nothing stored" if stored is None else f"{stored:.2f} bits"


def errors_and_perplexity(run: Run, policies: dict[str, Policy | None]) -> list[Row]:
    """A row for each policy: its settings, the four errors, perplexity and bits."""
    rows = [settings(name, policy) for name, policy in policies.items()]
    quantized = [row for row in rows if policies[row["name"]] is not None]
    with run.bar(1 + len(rows), "errors") as bar:
        measured = errors(run.model, run.ids, [policies[row["name"]] for row in quantized])
        for row, figures in zip(quantized, measured, strict=True):
            row.update(figures)
        bar.update()
        for row in rows:
            bar.set_description(f"perplexity, {row['name']}")
            row.update(perplexity_and_bits(run, policies[row["name"]]))
            bar.update()
    return rows


def recall_and_counting(run: Run, rows: list[Row], policies: Sequence[Policy | None], bar: tqdm,
                        counted: int = COUNTED) -> None:
    """Two generation tasks into each policy's row: verbatim recall, and counting on; with their standard errors."""
    text = prose("report")
    passages, answers = recall_items(run.tokenizer, text, seed=run.seed)
    tasks = {"recall": (recall, (passages, answers[:, :RECALLED])),
             "counting": (counting, counting_items(run.tokenizer, text, counted, seed=run.seed))}
    for name, (task, (prompts, answers)) in tasks.items():
        bar.set_description(name)
        for row, shares in zip(rows, task(run.model, prompts, answers, policies), strict=True):
            row[name], row[f"{name}_standard_error"] = mean_and_error(shares)
            bar.update()


def mean_and_error(shares: Tensor | Sequence[bool]) -> tuple[float, float]:
    """Mean over items, and its standard error.

    Example:
        >>> mean_and_error([False, True, False, True])
        (0.5, 0.28867513459481287)
    """
    shares = torch.as_tensor(shares, dtype=torch.float64)
    return shares.mean().item(), (shares.std() / len(shares) ** 0.5).item()
