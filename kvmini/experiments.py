"""The experiments: one function per claim of the article, each returning rows.

A row is a dict with the keys of the JSON files; printing is `__main__.py`'s business, drawing `plots.py`'s.
So far: `ablation`, the headline. Next file: `plots.py`.
"""

from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from math import log
from typing import Any

import torch
from tqdm import tqdm

from kvmini.cache import CachePolicy
from kvmini.errors import KvminiError
from kvmini.evaluate import perplexity, recall, recall_items
from kvmini.metrics import ERRORS, errors
from kvmini.model import Llama
from kvmini.policies import get
from kvmini.tokenizer import Tokenizer

AXIS_CHOICES = tuple((key, value) for key in ("per_token", "per_channel") for value in ("per_token", "per_channel"))
RIGHT = "K per_channel V per_token"
ADDED = ("+ residual 128", "+ sinks 4", "+ pre-RoPE")
TEXTS = ("calibration", "search", "report")  # what each may be used for; figures come from "report" alone


def prose(name: str) -> str:
    """The project's own English prose, written for it and in no model's training data.

    Example:
        >>> len(prose("report").split()) > 4000
        True
    """
    return (resources.files("kvmini") / "data" / f"{name}.txt").read_text(encoding="utf-8")


def ablation_policies(n_bits: int = 2, group_size: int = 32) -> dict[str, CachePolicy | None]:
    """Row name -> policy: exact, the four axis choices, then window, sinks and order on top of the right one.

    The four see everything dequantized ("all", as the papers' tables); what is added to them can only be
    judged as it would run, token by token ("streamed").
    """
    def spell(key: str, value: str, more: str) -> CachePolicy:
        return get(f"k={key}:{n_bits}:{group_size},v={value}:{n_bits}:{group_size},{more}")

    rows = {"exact": None}
    rows |= {f"K {key} V {value}": spell(key, value, "prefill=all") for key, value in AXIS_CHOICES}
    fields = "prefill=streamed"
    for name, field in zip(ADDED, ("residual=128", "sinks=4", "pre-rope"), strict=True):
        fields = f"{fields},{field}"
        rows[name] = spell("per_channel", "per_token", fields)
    return rows


def ablation(model: Llama, tokenizer: Tokenizer, ids: torch.Tensor, policies: dict[str, CachePolicy | None],
             seed: int = 0, progress: bool = False) -> list[dict[str, Any]]:
    """Errors and perplexity of each policy on `ids` `[1, T]`, and verbatim recall on the project's prose.

    A policy with prefill "exact" is measured as "streamed": in one call it would see nothing quantized.

    Returns:
        one row per policy, with the keys of `python -m kvmini ablate --json`; errors in percent, recall a
        share with its standard error over items, None where a figure does not apply.
    """
    policies = {name: policy and replace(policy, prefill="streamed" if policy.prefill == "exact" else policy.prefill)
                for name, policy in policies.items()}
    rows = [_settings(name, policy) for name, policy in policies.items()]
    quantized = [row for row in rows if policies[row["name"]] is not None]
    prompts, answers = recall_items(tokenizer, prose("report"), seed=seed)
    with tqdm(total=1 + 2 * len(rows), desc="errors", leave=False, disable=None if progress else True) as bar:
        measured = errors(model, ids, [policies[row["name"]] for row in quantized])
        for row, figures in zip(quantized, measured, strict=True):
            row.update(figures)
        bar.update()
        for row in rows:
            bar.set_description(f"perplexity, {row['name']}")
            cache = model.new_cache(policies[row["name"]])
            row["perplexity"] = perplexity(model, ids, cache)
            row["body_bits_per_element"] = cache.body_bits_per_element
            row["bits_per_element"] = cache.bits_per_element()
            row["bits_per_element_16bit_windows"] = cache.bits_per_element(window_bits=16)
            bar.update()
        bar.set_description("recall")
        for row, shares in zip(rows, recall(model, prompts, answers, policies.values()), strict=True):
            row["recall"] = shares.mean().item()
            row["recall_standard_error"] = (shares.std() / len(shares) ** 0.5).item()
            bar.update()
    return rows


def ablation_findings(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the rows say, in sentences; every figure and every verdict is computed from them."""
    by_name = {row["name"]: row for row in rows}
    exact, right = by_name["exact"]["perplexity"], by_name[RIGHT]
    four = sorted((by_name[f"K {key} V {value}"] for key, value in AXIS_CHOICES), key=lambda row: row["perplexity"])
    best, worst = four[0], four[-1]
    found = [f"Same bits, different axes: perplexity {best['perplexity']:.1f} ({best['name']}) to "
             f"{worst['perplexity']:.1f} ({worst['name']}), {worst['perplexity'] / best['perplexity']:.1f} times; "
             f"exact {exact:.1f}."]
    token, channel = right, by_name["K per_channel V per_channel"]
    stored, consumed = (_prefers(token[error], channel[error]) for error in ("value_error", "output_error"))
    found.append(f"Values: the stored error prefers {stored} ({token['value_error']:.1f}% per_token, "
                 f"{channel['value_error']:.1f}% per_channel), the consumer prefers {consumed} "
                 f"({token['output_error']:.1f}% and {channel['output_error']:.1f}%)"
                 + ("." if stored == consumed else ": the stored error points the wrong way."))
    before, gap, gains = right["perplexity"], log(right["perplexity"] / exact), []
    for name in ADDED:
        now = by_name[name]["perplexity"]
        gains.append(f"{name} {log(before / now) / gap:.0%}")
        before = now
    found.append("Of the log loss that the right axes still cost, each step gives back: " + ", ".join(gains)
                 + f" (perplexity {before:.1f}, exact {exact:.1f}).")
    key_cost = by_name["K per_token V per_token"]["perplexity"] / right["perplexity"]
    value_cost = channel["perplexity"] / right["perplexity"]
    here = "key" if key_cost > value_cost else "value"
    found.append(f"A wrong axis for keys multiplies perplexity by {key_cost:.2f}, for values by {value_cost:.2f}: here the "
                 f"{here} axis matters more. In the article (Llama-2-13B, CoQA) the value axis does: 63.53 falls to 2.88 "
                 "by it, to 52.93 by the key axis.")
    return found


def _prefers(token: float, channel: float) -> str:
    return "per_token" if token < channel else "per_channel"


def _settings(name: str, policy: CachePolicy | None) -> dict[str, Any]:
    """A row with its settings filled in and its figures still None."""
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


def text_ids(tokenizer: Tokenizer, text: str, tokens: int, model: Llama) -> torch.Tensor:
    """The first `tokens` tokens of a text, `[1, tokens]`.

    Raises:
        KvminiError if the text, or the model's context, is shorter.
    """
    if tokens > model.config.context_length:
        raise KvminiError(f"{tokens} tokens are past the model's context of {model.config.context_length}")
    ids = tokenizer.encode(text)
    if len(ids) < tokens:
        raise KvminiError(f"the text has only {len(ids)} tokens of the {tokens} asked for: give a longer text or fewer")
    return torch.tensor([ids[:tokens]])
