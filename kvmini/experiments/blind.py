"""How to be fooled: short multiple choice hardly sees a cache that generation cannot live with.

Next file: `experiments/flips.py`.
"""

from dataclasses import replace

from kvmini.evaluate import choice_items, choose, choose_in_one_call, recall, recall_items
from kvmini.experiments.run import AXIS_CHOICES, Result, Run, mean_and_error, settings
from kvmini.texts import prose

SAMPLE = 24  # items that are scored in one call too


def blind(run: Run) -> Result:
    """Accuracy on short multiple choice beside verbatim recall, through the same policies.

    Returns:
        rows: exact, then the four axis choices: accuracy where the options are scored after the prompt was handed
        over, and how many items changed; recall; for the policy that recalls least, how many items of a sample a
        single call, which sees nothing stored, judges as the exact model does.
    """
    chosen = {"exact": None} | {f"K {key} V {value}": run.policy(key, value) for key, value in AXIS_CHOICES}
    chosen |= {name: policy for name, policy in run.policies.items() if name != "exact"}
    chosen = {name: policy and replace(policy, prefill="exact") for name, policy in chosen.items()}
    rows = [settings(name, policy) for name, policy in chosen.items()]
    batches = choice_items(run.tokenizer, prose("report"))
    with run.bar(len(batches) + len(rows), "multiple choice") as bar:
        right: list[list[bool]] = [[] for _ in rows]
        for items in batches:
            for of_policy, found in zip(right, choose(run.model, items, chosen.values()), strict=True):
                of_policy += found
            bar.update()
        bar.set_description("recall")
        shares = recall(run.model, *recall_items(run.tokenizer, prose("report"), n_items=12, seed=run.seed),
                        chosen.values())
        for row, of_policy, share in zip(rows, right, shares, strict=True):
            row["accuracy"], row["accuracy_standard_error"] = mean_and_error(of_policy)
            row["recall"], row["recall_standard_error"] = mean_and_error(share)
            row["changed"] = sum(a != b for a, b in zip(of_policy, right[0], strict=True))
            row["items"] = len(of_policy)
            bar.update()
    worst = min(rows[1:], key=lambda row: row["recall"])
    sample, one_call = iter(batches), []
    while len(one_call) < SAMPLE:
        one_call += choose_in_one_call(run.model, next(sample), chosen[worst["name"]])
    worst["one_call_same"] = sum(a == b for a, b in zip(one_call, right[0], strict=False))
    worst["one_call_items"] = len(one_call)
    return {"rows": rows}


def findings(result: Result) -> list[str]:
    exact, *quantized = result["rows"]
    worst = next(row for row in quantized if "one_call_same" in row)
    right = next(row for row in quantized if row["name"] == "K per_channel V per_token")
    return [f"Accuracy {exact['accuracy']:.0%} exact, {right['accuracy']:.0%} with the right axes, "
            f"{worst['accuracy']:.0%} with {worst['name']} (± {worst['accuracy_standard_error']:.0%}, chance 25%); "
            f"recall {exact['recall']:.0%}, {right['recall']:.0%}, {worst['recall']:.0%}.",
            f"Scored in one call, {worst['one_call_same']} of {worst['one_call_items']} items come out as without "
            "quantization: such a call sees its own tokens exactly."]
