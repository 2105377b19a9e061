"""What every experiment is given, and what it gives back.

An experiment is a function from a `Run` to a `Result`: lists of rows, the main one named "rows". A row is a
dict with the keys of the JSON files. Beside it stands `findings`, from the result to sentences, the most
telling first; every figure and every verdict in them is computed from the rows. `plots` draws a result;
`catalogue.py` lists them all. Next file: `experiments/ablation.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from kvmini.cache import CachePolicy
from kvmini.evaluate import perplexity
from kvmini.metrics import ERRORS, errors
from kvmini.model import Llama
from kvmini.policies import get
from kvmini.tokenizer import Tokenizer

Row = dict[str, Any]
Result = dict[str, Any]  # "rows", and further lists of rows
AXES = ("per_token", "per_channel")
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
    policies: dict[str, CachePolicy | None] = field(default_factory=dict)  # asked for by name, besides the usual ones
    progress: bool = False

    def policy(self, key: str, value: str, more: str = "") -> CachePolicy:
        """The uniform quantizer on these two axes, at this run's bits and groups; `more` as policies are spelled."""
        return get(f"k={key}:{self.n_bits}:{self.group_size},v={value}:{self.n_bits}:{self.group_size}"
                   + (more and f",{more}"))

    def bar(self, total: int, what: str = "") -> tqdm:
        """A progress bar; silent unless progress is wanted and somebody watches."""
        return tqdm(total=total, desc=what, leave=False, disable=None if self.progress else True)


def settings(name: str, policy: CachePolicy | None) -> Row:
    """A row with its settings filled in and the common figures still None."""
    row = dict.fromkeys(("name", "key_axis", "value_axis", "residual_length", "sink_length", "pre_rope", "prefill",
                         "body_bits_per_element", "bits_per_element", "bits_per_element_16bit_windows", "perplexity",
                         "recall", "recall_standard_error", *ERRORS))
    row["name"] = name
    if policy is not None:
        row |= {"key_axis": getattr(policy.key.quantizer, "axis", None),
                "value_axis": getattr(policy.value.quantizer, "axis", None),
                "residual_length": max(policy.key.residual_length, policy.value.residual_length),
                "sink_length": policy.sinks, "pre_rope": policy.pre_rope, "prefill": policy.prefill}
    return row


def as_streamed(policy: CachePolicy | None) -> CachePolicy | None:
    """The policy as one call can judge it: with prefill "exact" that call would see nothing quantized."""
    return replace(policy, prefill="streamed") if policy and policy.prefill == "exact" else policy


def perplexity_and_bits(run: Run, policy: CachePolicy | None, chunk: int | None = None) -> Row:
    """Perplexity of the text through the policy, and the bits per element of the cache that it fills."""
    cache = run.model.new_cache(policy)
    return {"perplexity": perplexity(run.model, run.ids, cache, chunk),
            "body_bits_per_element": cache.body_bits_per_element,
            "bits_per_element": cache.bits_per_element,
            "bits_per_element_16bit_windows": cache.bits_per_element_at(window_bits=16)}


def errors_and_perplexity(run: Run, policies: dict[str, CachePolicy | None]) -> list[Row]:
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


def mean_and_error(shares: Tensor | Sequence[bool]) -> tuple[float, float]:
    """Mean over items, and its standard error.

    Example:
        >>> mean_and_error([False, True, False, True])
        (0.5, 0.28867513459481287)
    """
    shares = torch.as_tensor(shares, dtype=torch.float64)
    return shares.mean().item(), (shares.std() / len(shares) ** 0.5).item()
