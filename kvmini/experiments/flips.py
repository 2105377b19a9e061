"""Accuracy is not all: instructions whose form the exact model keeps and a quantized cache breaks.

Next file: `experiments/layers.py`.
"""

from dataclasses import replace
from math import sqrt

from kvmini.evaluate import filled
from kvmini.experiments.run import Result, Row, Run, as_streamed, perplexity_and_bits, settings
from kvmini.instructions import Instruction, answer, batches, instructions
from kvmini.model import generate

WANTED, NEW_TOKENS = 150, 32  # instructions kept by the exact model; tokens of an answer
FEW = 60  # of them, where many policies are compared


def flips(run: Run) -> Result:
    """Of the instructions that the exact model keeps, the share that each policy breaks, and that each layer breaks.

    Returns:
        rows: one per policy, with flip_rate, its Wilson interval (95%), kept, tried, and the perplexity of the text;
        kinds: how many of each kind; layers, protocol: see `layers.py`.
    """
    chosen = {"exact": None, f"the right axes, {run.n_bits} bits": run.policy("per_channel", "per_token")}
    if run.n_bits <= 4:
        finer = replace(run, n_bits=2 * run.n_bits)
        chosen[f"the right axes, {2 * run.n_bits} bits"] = finer.policy("per_channel", "per_token")
    chosen |= {name: policy for name, policy in run.policies.items() if name != "exact"}
    with run.bar(len(chosen) + 1, "selecting instructions") as bar:
        kept, tried = kept_instructions(run, WANTED)
        bar.update()
        rows = [settings(name, as_streamed(policy)) for name, policy in chosen.items()]
        answers = list(answered(run, kept, list(chosen.values())))  # exact again: what rounding alone flips
        bar.set_description("perplexity")
        for row, policy, keeps in zip(rows, chosen.values(), answers, strict=True):
            row |= rates(keeps) | {"tried": tried} | perplexity_and_bits(run, as_streamed(policy))
            bar.update()
    kinds = sorted({instruction.kind for instruction in kept})
    by_kind = [{"kind": kind, "kept": sum(i.kind == kind for i in kept)} | {
        name: sum(i.kind == kind and not keep for i, keep in zip(kept, keeps, strict=True))
        for name, keeps in zip(chosen, answers, strict=True)} for kind in kinds]
    return {"rows": rows, "kinds": by_kind}


def kept_instructions(run: Run, wanted: int) -> tuple[list[Instruction], int]:
    """Instructions that the exact model keeps, largest batch first until there are enough; and how many were tried."""
    candidates = instructions()
    lots = sorted((places for places, _ in batches(run.tokenizer, candidates)), key=len, reverse=True)  # fewest calls
    kept: list[Instruction] = []
    tried = 0
    while len(kept) < wanted and lots:
        likely = 2 * (wanted - len(kept))  # of the last batch, no more than can be needed
        lot = [candidates[i] for i in lots.pop(0)[:likely]]
        tried += len(lot)
        (keeps,) = answered(run, lot, [None])
        kept += [instruction for instruction, keep in zip(lot, keeps, strict=True) if keep]
    return kept, tried


def rates(keeps: list[bool]) -> Row:
    """The flip rate of instructions that the exact model keeps, None of none, and its interval."""
    flipped, n = len(keeps) - sum(keeps), len(keeps)
    low, high = wilson(flipped, n) if n else (None, None)
    return {"flip_rate": flipped / n if n else None, "flip_rate_low": low, "flip_rate_high": high, "kept": n}


def answered(run: Run, asked: list[Instruction], policies: list) -> list[list[bool]]:
    """Which answers have the form that was asked for, for each policy; greedy, prompts handed over first."""
    keeps = [[False] * len(asked) for _ in policies]
    for places, ids in batches(run.tokenizer, asked):
        for of_policy, cache in zip(keeps, filled(run.model, ids[:, :-1], policies), strict=True):
            new = generate(run.model, ids[:, -1:], cache, NEW_TOKENS, stop=run.tokenizer.stop_ids)
            for place, row in zip(places, new.tolist(), strict=True):
                of_policy[place] = asked[place].keeps(answer(run.tokenizer, row))
    return keeps


def wilson(hits: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share: 95% for the default z.

    Example:
        >>> [round(x, 3) for x in wilson(0, 150)]
        [0.0, 0.025]
    """
    share = hits / n
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def findings(result: Result) -> list[str]:
    exact, *rows = result["rows"]
    if not exact["kept"]:
        return [f"Not measurable here: the exact model keeps none of {exact['tried']} instructions."]
    said = []
    for row in rows:
        interval = f"{row['flip_rate_low']:.0%} to {row['flip_rate_high']:.0%}"
        said.append(f"{row['name']}: {row['flip_rate']:.0%} of {row['kept']} broken ({interval}) at "
                    f"{row['perplexity'] / exact['perplexity']:.2f} times the perplexity")
        if not measurable(row, exact):
            said[-1] += ", not measurable here"
    return ["; ".join(said) + f". Run again without quantization: {exact['flip_rate']:.0%}."]


def measurable(row: Row, exact: Row) -> bool:
    """Whether a policy's flips stand out from those of the exact model run again: their intervals do not meet."""
    return row["flip_rate_low"] > exact["flip_rate_high"]
