"""Which layer breaks behaviour, what kind of loss it is, and what keeping that layer exact gives back.

The protocol is that of Alignment Collapse Under KV Cache Quantization (arXiv 2606.09864), with harmless instructions
in the place of refusals: quantize one layer at a time; at the one that breaks most, compare one range for a whole
tensor with one for each channel (PCR); keep that layer exact. Next file: `experiments/frontier.py`.
"""

from collections.abc import Callable

import torch

from kvmini.cache import CachePolicy
from kvmini.experiments.flips import FEW, answered, flips, kept_instructions, rates
from kvmini.experiments.flips import findings as of_policies
from kvmini.experiments.run import Result, Row, Run
from kvmini.policies import Policy, get
from kvmini.quantizers.exact import ExactQuantizer
from kvmini.side import Side

DRAWS = 2000  # of the bootstrap


def layers(run: Run) -> Result:
    """Flips with one layer quantized at a time, then the protocol at the critical layer.

    Every token of a prompt counts: there is no window. Groups are a head's channels of one token, as in the source.

    Returns:
        rows: one per layer, with flip_rate and its interval; protocol: PCR and recovery with their 95% intervals,
        and the two flip rates that each is made of.
    """
    head = run.model.config.head_dim
    whole = get(f"k=per_token:{run.n_bits}:{head},v=per_token:{run.n_bits}:{head}")
    per = {"tensor": "static-tensor", "channel": "static"}
    static = {name: get(f"k={grid}:{run.n_bits},v={grid}:{run.n_bits},pre-rope", calibration=run.calibration)
              for name, grid in per.items()}
    n_layers = run.model.config.n_layers
    kept, tried = kept_instructions(run, FEW)
    alone = [only(whole, lambda layer, n=n: layer == n) for n in range(n_layers)]
    with run.bar(n_layers + 4, "one layer at a time") as bar:
        found = []
        for policy in alone:
            found += answered(run, kept, [policy])
            bar.update()
        rows = [{"layer": n} | rates(keeps) | {"tried": tried} for n, keeps in enumerate(found)]
        if not kept:
            return {"rows": rows, "protocol": []}
        critical = max(rows, key=lambda row: row["flip_rate"])["layer"]
        tensor, channel, all_layers, spared = answered(run, kept, [
            only(static["tensor"], lambda layer: layer == critical),
            only(static["channel"], lambda layer: layer == critical), whole,
            only(whole, lambda layer: layer != critical)])
        bar.update(4)
    return {"rows": rows, "protocol": [share_avoided("PCR", critical, tensor, channel, run.seed),
                                       share_avoided("recovery", critical, all_layers, spared, run.seed)]}


def flips_and_layers(run: Run) -> Result:
    """`flips`, with the figures of the layers beside it."""
    result, of_layers = flips(run), layers(run)
    return {**result, "layers": of_layers["rows"], "protocol": of_layers["protocol"]}


def only(policy: Policy, chosen: Callable[[int], bool]) -> CachePolicy:
    """The policy in the layers that are chosen, everything exact in the others."""
    def side(of: Side) -> Side:
        return Side(lambda layer: of.quantizer_of(layer) if chosen(layer) else ExactQuantizer())
    return CachePolicy(side(policy.key), side(policy.value), policy.sinks, policy.pre_rope, policy.prefill)


def share_avoided(name: str, layer: int, before: list[bool], after: list[bool], seed: int) -> Row:
    """1 - flips after / flips before, with its 95% interval by drawing instructions again; None where nothing flips.

    Example:
        >>> row = share_avoided("x", 0, [False] * 10 + [True] * 10, [False] * 5 + [True] * 15, seed=0)
        >>> row["value"], 0 < row["low"] < 0.5 < row["high"] < 1
        (0.5, True)
    """
    flips = torch.tensor([before, after]).logical_not().double()  # [2, n]
    drawn = torch.randint(len(before), (DRAWS, len(before)), generator=torch.Generator().manual_seed(seed))
    of_draws = flips[:, drawn].sum(-1)  # [2, DRAWS]
    shares = 1 - of_draws[1] / of_draws[0]
    shares = shares[of_draws[0] > 0]
    low, high = torch.quantile(shares, torch.tensor([0.025, 0.975]).double()).tolist() if len(shares) else (None, None)
    total = flips.sum(-1)
    return {"name": name, "layer": layer, "value": (1 - total[1] / total[0]).item() if total[0] else None,
            "low": low, "high": high, "before": total[0].item() / len(before), "after": total[1].item() / len(before),
            "kept": len(before)}


def findings(result: Result) -> list[str]:
    """Of the policies first, then of layers and protocol."""
    said = of_policies(result)
    if not result["protocol"]:
        return said
    pcr, recovery = result["protocol"]
    worst = result["layers"][pcr["layer"]]
    critical = [row["layer"] for row in result["layers"] if row["flip_rate_low"] >= 0.1]
    said.append(f"Alone, layer {worst['layer']} breaks most: {worst['flip_rate']:.0%} ({worst['flip_rate_low']:.0%} to "
                f"{worst['flip_rate_high']:.0%}) of {worst['kept']}; layers whose interval lies above 10%: "
                f"{', '.join(map(str, critical)) or 'none'}.")
    for row, what in ((pcr, "one range per channel there instead of one per tensor"),
                      (recovery, "keeping it exact, the others quantized")):
        broken_anyway = row["before"] == row["after"] == 1  # then drawing again gives an interval of no width
        unknown = broken_anyway or row["low"] is None or row["high"] - row["low"] > 0.5
        value = "undefined" if row["value"] is None else f"{row['value']:.0%} ({row['low']:.0%} to {row['high']:.0%})"
        said.append(f"{row['name']} ({what}): {value}, from {row['before']:.0%} to {row['after']:.0%} flips"
                    + ("; this model cannot tell." if unknown else "."))
    return said
