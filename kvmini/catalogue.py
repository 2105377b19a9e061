"""Every experiment: what it measures, what it shows of it, and how it is drawn. Next file: `claims.py`."""

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from kvmini.experiments import (
    ablation,
    blind,
    calibrated,
    frontier,
    groups,
    heads,
    key_order,
    layers,
    massive,
    memory,
    principle,
    reach,
    sinks,
    windows,
)
from kvmini.experiments.run import Result, Run
from kvmini.plots import behaviour, phenomena
from kvmini.plots import frontier as of_frontier
from kvmini.plots.ablation import ablation as draw_ablation
from kvmini.plots.memory import memory as draw_memory
from kvmini.tables import BITS, KEY_ERRORS, NAME, PERPLEXITY, VALUE_ERRORS, Column, plus_minus, table


@dataclass(frozen=True)
class Experiment:
    """From a run to a result, and from a result to text and figures."""

    help: str
    measure: Callable[[Run], Result]
    columns: dict[str, list[Column]]  # which lists of rows are printed, and how
    findings: Callable[[Result], list[str]]
    draw: dict[str, Callable[[Result, str], Figure]]  # by what is added to the file's name: "" for the main one
    notes: str = ""
    tokens: int = 1024
    takes_policies: bool = False  # whether `run.policies` add rows

    def text(self, result: Result) -> str:
        """The tables, the notes under them, and the findings."""
        shown = "\n\n".join(table(result[part], columns) for part, columns in self.columns.items())
        notes = self.notes and f"\n{self.notes}"
        return f"{shown}{notes}\n\n" + "\n".join(f"- {sentence}" for sentence in self.findings(result))


BIT_NOTE = "bits per element; body: packed part; held: with exact windows, float32 here; (w16): were these 16 bits."
RECALL_NOTE = """\
recall: of passages of report.txt, whatever the text; the answers lie outside a window of 128;
        ± one standard error over the passages."""
RECALL = ("\nrecall, %", "recall", plus_minus("recall"))
PREFILL = ("\nprefill", "prefill", "")
MEMORY_NOTE = """\
Weights and cache alone, windows 16 bits wide; GiB is 2^30 bytes, and a card sold as 80 GB holds 80 GiB. At least, at
most: weights and cache are read once a step at full bandwidth; a program that falls short of it can gain more."""


def _gib(key: str) -> Callable[[dict], str]:
    return lambda row: f"{row[key] / 2**30:,.2f}"


def _of(total: str) -> Callable[[dict], str]:
    return lambda row: f"{row['one_call_same']} of {row[total]}"


def _over(row: dict) -> str:
    return f"{100 * row['perplexity_ratio'] - 100:+.1f}"


FLIPS = (("flip rate", "flip_rate", ".1%"), ("from", "flip_rate_low", ".1%"), ("to", "flip_rate_high", ".1%"),
         ("of", "kept", "d"))
EXPERIMENTS = {
    "ablate": Experiment(
        "the headline table: four ways to spend two bits", ablation.ablation,
        {"rows": [NAME, PREFILL, *BITS, PERPLEXITY, RECALL, *KEY_ERRORS, *VALUE_ERRORS]}, ablation.findings,
        {"": draw_ablation}, f"{BIT_NOTE}\n{RECALL_NOTE}", takes_policies=True),
    "memory": Experiment(
        "weights and cache against context; what fits; the ceiling of any gain", lambda run: memory.memory(),
        {"rows": [NAME, ("\ncontext", "context", ",d"), ("weights,\nGiB", "", _gib("weight_bytes")),
                  ("cache,\nGiB", "", _gib("cache_bytes")), ("weights,\n%", "weight_share", ".1f"),
                  ("cache,\n%", "cache_share", ".1f"), ("step, ms,\nat least", "step_ms_at_least", ".1f"),
                  ("gain at most,\nsame batch", "gain_at_most", ".2f"),
                  ("\nown batch", "gain_at_most_own_batch", ".2f")],
         "fits": [NAME, *((f"largest batch\nat {n:,}", f"largest_batch_{n}", ",d") for n in memory.CONTEXTS),
                  ("longest\ncontext", "longest_context", ",d"),
                  ("outgrows\nweights at", "outgrows_weights_at", ",d")]},
        memory.findings, {"": draw_memory}, MEMORY_NOTE, takes_policies=True),
    "groups": Experiment(
        "half a step, and the outlier that coarsens its group", groups.groups,
        {part: [NAME, ("step", "step", ".3f"), ("worst error, steps", "worst_steps", ".3f"),
                ("error of the others, %", "error", ".1f")] for part in ("rows", "model")},
        groups.findings, {"": phenomena.groups}),
    "errors": Experiment(
        "errors of keys and values, stored and consumed, by axis, layer and head; sparsity; outlier channels",
        heads.heads,
        {"rows": [NAME, *KEY_ERRORS, *VALUE_ERRORS,
                  *(("elementwise:\n" + name.split("_")[0], f"elementwise_{name}", ".0f") for name in heads.ERRORS)],
         "heads": [("\nlayer", "layer", "d"), ("\nhead", "head", "d"),
                   *((f"{name.replace('_', ' ')}\n{axis}", f"{name}_{axis}", ".1f")
                     for name in heads.ERRORS for axis in heads.AXES),
                   ("weights <\n0.001", "below_0.001", ".1%"), ("on first\ntoken", "first_token", ".1%"),
                   ("largest\nchannel", "largest_channel", "d")],
         "sparsity": [("threshold", "threshold", "g"), ("causal weights below it", "below", ".1%")],
         "channels": [NAME, ("a token's 4 largest are the head's", "persistence", ".0%"),
                      ("two heads share", "overlap", ".0%"), ("chance", "chance", ".0%")]},
        heads.findings, {"": phenomena.errors, "-channels": phenomena.channels, "-sparsity": phenomena.sparsity},
        "one norm per head; elementwise: rms of (x - x_hat) / |x|, |x| at least 1% of its row's norm; prefill all."),
    "sinks": Experiment(
        "why the value axis matters: exact first tokens, attention against value norms, a synthetic sink", sinks.sinks,
        {"rows": [NAME, *BITS, PERPLEXITY, *VALUE_ERRORS],
         "synthetic": [NAME, ("values, %:\nstored", "value_error", ".1f"), ("\noutput", "output_error", ".1f"),
                       ("output,\nsink exact", "output_error_sink_exact", ".1f")]},
        sinks.findings, {"": phenomena.sinks}, "keys per channel; prefill streamed."),
    "massive": Experiment(
        "massive activations of the residual stream, and what is lost without them", massive.massive_activations,
        {"rows": [("\nlayer", "layer", "d"), ("largest\nvalue", "value", ",.0f"),
                  ("times the\nmedian", "ratio", ",.0f"),
                  ("at\ntoken", "token", "d"), ("\ndimension", "dimension", "d"),
                  ("its attention in\nthe next layer", "attention", ".1%"),
                  ("most attention\nis on token", "most_attention_on", "d")],
         "effects": [NAME, ("numbers changed", "changed", "d"), ("perplexity", "perplexity", ",.1f")]},
        massive.findings, {"": phenomena.massive}, tokens=512),
    "rope": Experiment(
        "keys stored before RoPE or after, on both axes", key_order.rope,
        {"rows": [NAME, *BITS, PERPLEXITY, *KEY_ERRORS],
         "added": [("what RoPE adds, %", "name", ""), ("stored error", "key_error", "+.0f"),
                   ("score error", "score_error", "+.0f"), ("perplexity", "perplexity", "+.0f")]},
        key_order.findings, {"": phenomena.rope}, "values per token; prefill streamed."),
    "residual": Experiment(
        "the recent window: recall, counting and perplexity against its length", windows.residual,
        {"rows": [NAME, *BITS, PERPLEXITY, RECALL, ("\ncounting, %", "counting", plus_minus("counting"))]},
        windows.residual_findings, {"": behaviour.residual},
        f"{BIT_NOTE}\nperplexity: streamed.\n{RECALL_NOTE}", tokens=512, takes_policies=True),
    "timeline": Experiment(
        "what is exact after each step, and the bytes of the cache", windows.timeline,
        {"rows": [NAME, *((f"{what} keys\nexact", f"{what}_keys", "d") for what in ("fewest", "most")),
                  *((f"{what} values\nexact", f"{what}_values", "d") for what in ("fewest", "most")),
                  ("bytes at\nthe end", "last_nbytes", ",d")]},
        windows.timeline_findings, {"": behaviour.timeline}, tokens=512),
    "modes": Experiment(
        "one policy's perplexity, measured in five ways", windows.modes,
        {"rows": [NAME, *BITS, PERPLEXITY]}, windows.modes_findings, {"": behaviour.modes}, tokens=512),
    "blind": Experiment(
        "short multiple choice beside generation, through the same policies", blind.blind,
        {"rows": [NAME, ("multiple choice,\naccuracy, %", "accuracy", plus_minus("accuracy")),
                  ("items that\nchange", "changed", "d"),
                  ("as exact in\none call", "one_call_same", _of("one_call_items")), RECALL]},
        blind.findings, {"": behaviour.blind}, RECALL_NOTE, takes_policies=True),
    "flips": Experiment(
        "instructions that the exact model keeps and a policy, or one layer alone, breaks", layers.flips_and_layers,
        {"rows": [NAME, *FLIPS, ("tried", "tried", "d"), ("perplexity", "perplexity", ".1f")],
         "layers": [("layer", "layer", "d"), *FLIPS],
         "protocol": [NAME, ("layer", "layer", "d"), ("value", "value", ".0%"), ("from", "low", ".0%"),
                      ("to", "high", ".0%"), ("flips before", "before", ".0%"), ("after", "after", ".0%")]},
        layers.findings, {"": behaviour.flips, "-layers": of_frontier.layers},
        "from, to: 95%, Wilson's, the protocol's by bootstrap; perplexity of the text, streamed.",
        tokens=512, takes_policies=True),
    "frontier": Experiment(
        "every method through the same cache: bits, perplexity, recall, counting, flips, cost", frontier.frontier,
        {"rows": [NAME, *BITS, PERPLEXITY, ("over\nexact, %", "perplexity_ratio", _over), RECALL,
                  ("\ncounting, %", "counting", plus_minus("counting")), ("flips,\n%", "flip_rate", ".0%"),
                  ("\nfrom", "flip_rate_low", ".0%"), ("\nto", "flip_rate_high", ".0%"),
                  ("step, times\nexact's", "step_ratio", ".2f")]},
        frontier.findings, {"": of_frontier.frontier},
        f"{BIT_NOTE}\nperplexity: streamed. step: of the path that dequantizes and then attends.\n{RECALL_NOTE}\n"
        "flips: prompts and answers are shorter than a window of 128, so where there is one nothing is stored.\n"
        "recall: what waits for a group of 128, or for InnerQ's first 128 tokens, is exact: here all such keys.",
        tokens=1024, takes_policies=True),
    "reach": Experiment(
        "the policies found by search beside the papers' own, on two texts with intervals", reach.reach,
        {"rows": [NAME, *BITS, ("perplexity over exact, %:\ntext", "rise_text", "+.2f"), ("\n±", "half_text", ".2f"),
                  ("\ncode", "rise_code", "+.2f"), ("\n±", "half_code", ".2f"), ("\nmean", "rise_mean", "+.2f"),
                  ("\n±", "half_mean", ".2f")]},
        reach.findings, {"": of_frontier.reach}, f"{BIT_NOTE}\ncode: the source of Python's argparse; ±: 95%.",
        tokens=2048, takes_policies=True),
    "calibration": Experiment(
        "what methods that measure beforehand are told about the model", calibrated.calibrated,
        {"rows": [("\nlayer", "layer", "d"), ("largest\n|k|", "largest_key", ".1f"),
                  ("largest\n|v|", "largest_value", ".1f"), ("widest channel\nof K", "widest_channel", ".1f"),
                  ("keys outside\nhere, %", "outside", ".1%"), ("gradient^2,\nK over V", "gradient_ratio", ".3f"),
                  ("levels of K\nat 2 bits", "key_levels", ""), ("levels of V\nat 2 bits", "value_levels", "")]},
        calibrated.findings, {"": of_frontier.calibrated}),
    "principle": Experiment(
        "stored against consumed outside the cache; one channel or token lost", principle.principle,
        {"rows": [NAME, ("groups of", "group_size", "d"), ("stored, %", "stored", ".1f"),
                  ("consumed, %", "consumed", ".1f"), ("layers", "layers", "d"), ("of", "of", "d")],
         "corrupted": [("set to zero", "name", ""), ("output error, %:\nstrongest", "output_error_most", ".1f"),
                       ("\nmedian", "output_error_median", ".1f")]},
        principle.findings, {"": behaviour.principle}),
}
