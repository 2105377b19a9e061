"""Rows as text: the tables that the commands print, and what they say in sentences.

Every figure and every verdict is computed from the rows; nothing is measured here. Next file: `plots.py`.
"""

from collections.abc import Sequence
from math import exp, log
from typing import Any

from kvmini.experiments import ADDED, AXIS_CHOICES, RIGHT, STREAMED
from kvmini.metrics import ERRORS


def ablation(rows: Sequence[dict[str, Any]]) -> str:
    """The headline table."""
    def show(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    names = max(len(row["name"]) for row in rows)
    lines = [f"{'':{names}}            bits per element                recall    keys, error %    values, error %",
             f"{'':{names}}  prefill    body   held  (w16)  perplexity   %        stored  scores    stored  output"]
    for row in rows:
        key, score, value, output = (show(row[name], ".1f") for name in ERRORS)
        lines.append(f"{row['name']:{names}}  {row['prefill'] or '-':8} "
                     f"{show(row['body_bits_per_element'], '.2f'):>6} {row['bits_per_element']:6.2f} "
                     f"{row['bits_per_element_16bit_windows']:6.2f}  {row['perplexity']:10.1f}  "
                     f"{100 * row['recall']:3.0f} ± {100 * row['recall_standard_error']:2.0f}   "
                     f"{key:>6}  {score:>6}    {value:>6}  {output:>6}")
    lines.append("body: the packed part alone; held: with exact windows, float32 here; (w16): were these 16 bits wide.")
    lines.append("recall: of passages of report.txt, whatever the text; the answers lie outside a window of 128;")
    lines.append("        ± one standard error over the passages.")
    return "\n".join(lines)


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
                 + (": the stored error points the wrong way."
                    if {stored, consumed} == {"per_token", "per_channel"} else "."))
    if any(row["prefill"] and row["body_bits_per_element"] is None for row in rows):
        found.append("Rows without bits of a body quantized nothing on so short a text: they are exact.")
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
    key_cost = by_name["K per_token V per_token"]["perplexity"] / right["perplexity"]
    value_cost = channel["perplexity"] / right["perplexity"]
    here = "key" if key_cost > value_cost else "value"
    found.append(f"A wrong axis for keys multiplies perplexity by {key_cost:.2f}, for values by {value_cost:.2f}: here "
                 f"the {here} axis matters more. In KIVI's table, which the article quotes (Llama-2-13B, CoQA), the "
                 "value axis does: 63.53 falls to 2.88 by it, to 52.93 by the key axis.")
    return found


def _prefers(token: float, channel: float) -> str:
    return "neither axis" if token == channel else "per_token" if token < channel else "per_channel"


