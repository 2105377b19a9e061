"""The article's claims, one by one: what it says, what we measure, and whether the two agree.

The figures said are the article's, or those of the papers that it rests on, on their models; ours are of the
model that ran. So "agrees" is about the direction of a claim, never about its size: "yes" where
every direction in it is ours too, "in part" where some are. Next file: `files.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from textwrap import wrap

from kvmini.catalogue import EXPERIMENTS
from kvmini.experiments.flips import measurable
from kvmini.experiments.massive import on_the_sink
from kvmini.experiments.run import Result, Row
from kvmini.experiments.windows import RESIDUALS

YES, PARTLY, NO, OPEN = "yes", "in part", "no", "not measured"


@dataclass(frozen=True)
class Claim:
    """A claim, the experiment that measures it, which of its findings say so, and the verdict."""

    number: int
    title: str
    says: str
    experiment: str
    findings: tuple[int, ...]
    agrees: Callable[[Result], str]

    def row(self, result: Result | None) -> Row:
        """The row of the table, from the experiment's result."""
        row = {"number": self.number, "title": self.title, "says": self.says}
        if result is None:
            return row | {"measured": "Not measured.", "agrees": OPEN}
        found = EXPERIMENTS[self.experiment].findings(result)
        measured = " ".join(found[i] for i in self.findings if i < len(found))
        return row | {"measured": measured, "agrees": self.agrees(result)}


def verdict(*holds: bool) -> str:
    """All of them, some, or none.

    Example:
        >>> verdict(True, True), verdict(True, False), verdict(False)
        ('yes', 'in part', 'no')
    """
    return YES if all(holds) else PARTLY if any(holds) else NO


def _four(result: Result) -> str:
    tt, tc, ct, cc = (row["perplexity"] for row in result["rows"][1:5])
    return verdict(ct < min(tt, tc, cc), ct < cc < tt, min(tc, cc) > max(ct, tt))  # there, the value axis decides


def _memory(result: Result) -> str:
    return verdict(*(row["agrees"] for row in result["article"] if row["says"]))  # in every reading of it


def _groups(result: Result) -> str:
    sizes = [row["error"] for row in result["rows"]]
    model = {row["name"]: row["error"] for row in result["model"]}
    if not {"per_token, with the largest channel", "per_token, without the largest channel"} <= model.keys():
        return OPEN  # one group is the whole token, or no group was filled
    worst = max(row["worst_steps"] for row in (*result["rows"], *result["model"]))
    return verdict(worst < 0.5001, sizes[0] < sizes[2] < sizes[-1],
                   model["per_token, with the largest channel"] > model["per_token, without the largest channel"])


def _channels(result: Result) -> str:
    before, after = result["channels"]
    return verdict(before["persistence"] > 4 * before["chance"], after["persistence"] < before["persistence"],
                   before["overlap"] is not None and before["overlap"] < 0.5)


def _errors(result: Result) -> str:
    token, channel = result["rows"]
    wanted = {"key_error": 1, "score_error": 1, "value_error": 1, "output_error": -1}  # where per_channel is the better
    return verdict(*(sign * (token[prefix + name] - channel[prefix + name]) > 0
                     for prefix in ("", "elementwise_") for name, sign in wanted.items()))


def _sinks(result: Result) -> str:
    by_name = {row["name"]: row["output_error"] for row in result["rows"]}
    gap, spared = (by_name[f"V per_channel, sinks {n}"] - by_name[f"V per_token, sinks {n}"] for n in (0, 1))
    sparse = {row["value_axis"]: row["output_error"] for row in result["synthetic"] if row["share"] == 0}
    # The article: sparsity makes per_token safe. Here: without the sink, sparsity alone does not tell the axes apart.
    return verdict(gap > 0, spared > gap / 2, sparse["per_channel"] > 1.5 * sparse["per_token"])


def _massive(result: Result) -> str:
    whole, zero, mean, _ = (row["perplexity"] for row in result["effects"])
    on_sink, of = on_the_sink(result)
    return NO if not of else verdict(on_sink > of / 2, zero > 2 * whole, mean < 1.1 * whole)


def _rope(result: Result) -> str:
    _, channel = result["added"]
    if None in channel.values():
        return OPEN
    return verdict(channel["key_error"] > 0, channel["score_error"] > 0, channel["perplexity"] > 0)


def _residual(result: Result) -> str:
    exact, windows = result["rows"][0], result["rows"][1:1 + len(RESIDUALS)]
    none, most = windows[0], windows[-1]

    def gives_back(task: str) -> bool:  # at least half of what no window loses, beyond two standard errors
        noise = 2 * (most[f"{task}_standard_error"]**2 + none[f"{task}_standard_error"]**2) ** 0.5
        return most[task] - none[task] > max(noise, (exact[task] - none[task]) / 2)
    return verdict(gives_back("recall"), gives_back("counting"), most["perplexity"] < none["perplexity"])


def _timeline(result: Result) -> str:
    kivi = result["rows"][1]
    return verdict(kivi["fewest_keys"] < kivi["most_keys"], kivi["fewest_values"] == kivi["most_values"])


def _blind(result: Result) -> str:
    exact, *rows = result["rows"]
    worst = min(rows, key=lambda row: row["recall"])
    return verdict(worst["accuracy"] > 0.9 * exact["accuracy"], worst["recall"] < 0.5 * exact["recall"])


def _modes(result: Result) -> str:
    found = {row["name"]: row["perplexity"] for row in result["rows"]}
    decoded, streamed = found["decoded, 1 at a time"], found["one call, streamed"]
    return verdict(abs(found["one call, exact"] / found["exact"] - 1) < 1e-3, decoded > 1.05 * found["exact"],
                   abs(streamed / decoded - 1) < abs(found["one call, all"] / decoded - 1))


def _flips(result: Result) -> str:
    exact, *rows = result["rows"]
    if not exact["kept"]:
        return OPEN
    unseen = [row for row in rows if row["perplexity"] < 1.05 * exact["perplexity"]]  # what perplexity does not see
    return YES if any(measurable(row, exact) for row in unseen) else OPEN


def _costs(result: Result, name: str, most: float) -> str:
    """Whether a policy raises perplexity at most so much, as a share of the exact cache's."""
    return verdict(next(row["perplexity_ratio"] for row in result["rows"] if row["name"] == name) < 1 + most)


def _xquant(result: Result) -> str:
    held = [row for row in result["rows"] if row["name"].startswith("xquant") and row["body_bits_per_element"]]
    small = [row for row in held if 16 / row["body_bits_per_element"] >= 7.7]
    return verdict(any(row["perplexity_ratio"] < 1 + 0.1 / 5.47 for row in small)) if held else OPEN


def _fp8(result: Result) -> str:
    exact, e5m2 = result["rows"][0], next(row for row in result["rows"] if row["name"] == "fp8-e5m2")
    return verdict(measurable(e5m2, exact)) if exact["kept"] else OPEN


def _principle(result: Result) -> str:
    differ, holds = result["rows"][2], []
    for which in ("output_error_most", "output_error_median"):
        lost = {row["name"]: row[which] for row in result["corrupted"]}
        holds += [lost["one channel of K"] > lost["one token of K"], lost["one channel of V"] > lost["one token of V"]]
    return verdict(2 * differ["layers"] > differ["of"], *holds)


CLAIMS = (
    Claim(1, "Four ways to spend two bits",
          "Llama-2-13B, CoQA, of 66.37: 63.53 (K channel, V token), 52.93 (K token, V token), 2.88 (K channel, V "
          "channel), 2.80 (K token, V channel).",
          "ablate", (0, 2), _four),
    Claim(2, "Why the KV cache hurts",
          "LLaMA-7B: weights 98% and cache 2% at 512 tokens, 16% and 84% at 128K. OPT-175B, batch 512: 1.2 TB. KIVI: "
          "4 times the batch, 2.6 times less peak memory, 2.35 to 3.47 times the throughput. KVQuant: 1M tokens of "
          "LLaMA-7B on one 80 GB card.",
          "memory", (0,), _memory),
    Claim(3, "What quantization error is made of",
          "At most half a step; one element a hundred times its neighbours coarsens its whole group.",
          "groups", (0, 1), _groups),
    Claim(4, "Keys: outliers live in fixed channels",
          "Outlier channels are the same at every token, and differ between heads.",
          "errors", (1,), _channels),
    Claim(5, "Stored against consumed",
          "Llama-2-13B, per token / per channel: keys stored 13.67 / 4.55, scores 47.00 / 9.60; values stored 4.57 / "
          "3.73, output 3.55 / 49.89.",
          "errors", (0, 3), _errors),
    Claim(6, "Attention is sparse", "84.3% (no threshold stated).", "errors", (2,),
          lambda result: verdict(result["sparsity"][1]["below"] > 0.843)),
    Claim(7, "Values: where intuition fails", "Sparse attention is what makes per-token values safe.",
          "sinks", (0, 1, 2), _sinks),
    Claim(8, "Massive activations",
          "Mixtral 8x7B: near 7,000 against a median of 0.3; they act as biases and draw attention.",
          "massive", (0, 1), _massive),
    Claim(9, "RoPE complicates keys",
          "RotateKV: RoPE adds 145% to the quantization error. KVQuant: keys before RoPE.",
          "rope", (0, 1), _rope),
    Claim(10, "The recent window is load-bearing",
          "Llama-2-7B, GSM8K, of 13.50: 5.76 at 2 bits with no window, 12.74 with one of 128.",
          "residual", (0,), _residual),
    Claim(11, "The systems tax",
          "Per-channel keys wait in a window of up to 128 tokens; per-token values need no waiting.",
          "timeline", (0, 1), _timeline),
    Claim(12, "Do not validate on short multiple choice",
          "Multiple choice hardly moves where generation breaks.",
          "blind", (0, 1), _blind),
    Claim(13, "Measure perplexity as it streams", "Validate what the deployed path sees.", "modes", (0,), _modes),
    Claim(14, "The frontier: KVQuant", "LLaMA-7B: less than 0.1 perplexity, of 5.68, lost at 3 bits.",
          "frontier", (1,), lambda result: _costs(result, "kvquant-3", 0.1 / 5.68)),
    Claim(14, "The frontier: RotateKV", "Llama-2-13B: less than 0.3 perplexity, of 4.57, lost at 2 bits.",
          "frontier", (2,), lambda result: _costs(result, "rotatekv-2", 0.3 / 4.57)),
    Claim(14, "The frontier: InnerQ",
          "1.3 times as fast as earlier kernels for a quantized cache, 2.7 times as fast as 16 bits.",
          "frontier", (3,), lambda result: OPEN),  # a matter of GPU kernels
    Claim(14, "The frontier: XQuant",
          "7.7 times less memory for less than 0.1 perplexity, of 5.47; across layers 10 times for 0.01.",
          "frontier", (4,), _xquant),
    Claim(14, "The frontier: FP8", "e5m2 with scale 1: 30.3% of Qwen-2.5-7B's refusals lost.",
          "frontier", (5,), _fp8),
    Claim(15, "Accuracy is not all",
          "Mistral-7B loses 15.2% of its refusals at 1.03 times the perplexity.",
          "flips", (0,), _flips),
    Claim(16, "The general principle",
          "Measure the error where a tensor is consumed. A corrupted channel of K poisons all scores, a corrupted "
          "token of V is weighted out.",
          "principle", (0, 1), _principle),
)


def text(rows: list[Row]) -> str:
    """The claims as blocks of text."""
    blocks = []
    for row in rows:
        lines = [f"{row['number']:>2} {row['title']}"]
        here = f"{row['measured']} ({row['tokens']} tokens)" if row.get("tokens") else row["measured"]
        for head, what in (("article", row["says"]), ("here", here), ("agrees", row["agrees"])):
            first, *rest = wrap(what, 100)
            lines += [f"   {head:8} {first}", *(f"            {more}" for more in rest)]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
