"""The headline: four ways to spend two bits, then window, sinks and order on top of the right one.

Next file: `experiments/memory.py`.
"""

from dataclasses import replace
from math import exp, log

from kvmini.cache import CachePolicy
from kvmini.errors import KvminiError
from kvmini.evaluate import recall, recall_items
from kvmini.experiments.run import AXIS_CHOICES, Result, Run, as_streamed, errors_and_perplexity, mean_and_error
from kvmini.texts import prose

RIGHT, STREAMED = "K per_channel V per_token", "the right axes, streamed"
ADDED = ("+ residual 128", "+ sinks 4", "+ pre-RoPE")


def ablation_policies(run: Run) -> dict[str, CachePolicy | None]:
    """Row name -> policy: exact, the four axis choices, then window, sinks and order on top of the right one.

    The four see everything dequantized ("all", as the papers' tables); what is added can only be judged as it
    would run, token by token ("streamed"), so the right axes are there in that mode too.
    """
    rows = {"exact": None}
    rows |= {f"K {key} V {value}": run.policy(key, value, "prefill=all") for key, value in AXIS_CHOICES}
    fields = "prefill=streamed"
    rows[STREAMED] = run.policy("per_channel", "per_token", fields)
    for name, field in zip(ADDED, ("residual=128", "sinks=4", "pre-rope"), strict=True):
        fields = f"{fields},{field}"
        rows[name] = run.policy("per_channel", "per_token", fields)
    return rows


def ablation(run: Run) -> Result:
    """Errors and perplexity of each policy on the text, and verbatim recall on the project's prose.

    A policy with prefill "exact" is measured as "streamed": in one call it would see nothing quantized.

    Returns:
        one row per policy, with the keys of `python -m kvmini ablate --json`; errors in percent, recall a
        share with its standard error over items, None where a figure does not apply.
    """
    policies = ablation_policies(run) | {name: policy for name, policy in run.policies.items() if name != "exact"}
    policies = {name: as_streamed(policy) for name, policy in policies.items()}
    prompts, answers = recall_items(run.tokenizer, prose("report"), seed=run.seed)
    needed, context = prompts.shape[1] + answers.shape[1], run.model.config.context_length
    if needed > context:
        raise KvminiError(f"recall needs {needed} tokens, past the model's context of {context}")
    rows = errors_and_perplexity(run, policies)
    as_run = {name: policy and replace(policy, prefill="exact") for name, policy in policies.items()}
    distinct = list(dict.fromkeys(as_run.values()))  # the prompt is given, so `prefill` makes no difference
    shares_of = {}
    with run.bar(len(distinct), "recall") as bar:
        for policy, shares in zip(distinct, recall(run.model, prompts, answers, distinct), strict=True):
            shares_of[policy] = mean_and_error(shares)
            bar.update()
    for row in rows:
        row["recall"], row["recall_standard_error"] = shares_of[as_run[row["name"]]]
    return {"rows": rows}


def findings(result: Result) -> list[str]:
    """What the rows say, in sentences; every figure and every verdict is computed from them."""
    rows = result["rows"]
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
                 + (": the stored error points the wrong way."
                    if {stored, consumed} == {"per_token", "per_channel"} else "."))
    key_cost = by_name["K per_token V per_token"]["perplexity"] / right["perplexity"]
    value_cost = channel["perplexity"] / right["perplexity"]
    here = "key" if key_cost > value_cost else "value"
    found.append(f"A wrong axis for keys multiplies perplexity by {key_cost:.2f}, for values by {value_cost:.2f}: here "
                 f"the {here} axis matters more. In KIVI's table, which the article quotes (Llama-2-13B, CoQA), the "
                 "value axis does: 63.53 falls to 2.88 by it, to 52.93 by the key axis.")
    gap = log(by_name[STREAMED]["perplexity"] / exact)
    if gap < 0.01:
        found.append(f"Streamed, the right axes alone change perplexity by {exp(gap) - 1:+.1%}: "
                     "there is nothing to give back.")
    else:
        ladder = [by_name[STREAMED]["perplexity"], *(by_name[name]["perplexity"] for name in ADDED)]
        gains = [f"{name} {log(before / now) / gap:.0%}"
                 for name, before, now in zip(ADDED, ladder, ladder[1:], strict=False)]
        found.append("Of the log loss that the right axes still cost when streamed, each step gives back: "
                     + ", ".join(gains) + f" (perplexity {ladder[-1]:.1f}, exact {exact:.1f}).")
    if any(row["prefill"] and row["body_bits_per_element"] is None for row in rows):
        found.append("Rows without bits of a body quantized nothing on so short a text: they are exact.")
    return found


def _prefers(token: float, channel: float) -> str:
    return "neither axis" if token == channel else "per_token" if token < channel else "per_channel"


