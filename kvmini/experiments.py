"""The experiments: one function per claim of the article, each returning rows.

A row is a dict with the keys of the JSON files; `tables.py` puts it into words, `plots.py` into a picture.
So far: `ablation`, the headline. Next file: `tables.py`.
"""

from dataclasses import replace
from importlib import resources
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
RIGHT, STREAMED = "K per_channel V per_token", "the right axes, streamed"
ADDED = ("+ residual 128", "+ sinks 4", "+ pre-RoPE")
TEXTS = ("calibration", "search", "report")  # what each may be used for; figures come from "report" alone


def prose(name: str) -> str:
    """The project's own English prose, written for it and in no model's training data.

    Example:
        >>> len(prose("report").split()) > 4000
        True
    """
    return (resources.files("kvmini") / "data" / f"{name}.txt").read_text(encoding="utf-8")


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


def ablation_policies(n_bits: int = 2, group_size: int = 32) -> dict[str, CachePolicy | None]:
    """Row name -> policy: exact, the four axis choices, then window, sinks and order on top of the right one.

    The four see everything dequantized ("all", as the papers' tables); what is added can only be judged as it
    would run, token by token ("streamed"), so the right axes are there in that mode too.
    """
    def spell(key: str, value: str, more: str) -> CachePolicy:
        return get(f"k={key}:{n_bits}:{group_size},v={value}:{n_bits}:{group_size},{more}")

    rows = {"exact": None}
    rows |= {f"K {key} V {value}": spell(key, value, "prefill=all") for key, value in AXIS_CHOICES}
    fields = "prefill=streamed"
    rows[STREAMED] = spell("per_channel", "per_token", fields)
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
    needed = prompts.shape[1] + answers.shape[1]
    if needed > model.config.context_length:
        raise KvminiError(f"recall needs {needed} tokens, past the model's context of {model.config.context_length}")
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
            row["bits_per_element"] = cache.bits_per_element
            row["bits_per_element_16bit_windows"] = cache.bits_per_element_at(window_bits=16)
            bar.update()
        bar.set_description("recall")
        as_run = {name: policy and replace(policy, prefill="exact") for name, policy in policies.items()}
        distinct = list(dict.fromkeys(as_run.values()))  # the prompt is given, so `prefill` makes no difference
        shares_of = dict(zip(distinct, recall(model, prompts, answers, distinct), strict=True))
        for row in rows:
            shares = shares_of[as_run[row["name"]]]
            row["recall"] = shares.mean().item()
            row["recall_standard_error"] = (shares.std() / len(shares) ** 0.5).item()
            bar.update()
    return rows


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
