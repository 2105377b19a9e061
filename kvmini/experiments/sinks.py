"""Why the value axis matters, sharper than sparsity: the sink.

The first token gets much of the attention and has a short value vector. A per-channel group makes it share
a range with ordinary tokens; per token it has a small scale of its own. Next file: `experiments/massive.py`.
"""

import torch
from torch import Tensor

from kvmini.experiments.run import AXES, Result, Run, errors_and_perplexity
from kvmini.metrics import consumed_error
from kvmini.phenomena import causal_weights, exact_layers, received
from kvmini.quantizers.uniform import UniformQuantizer

SINKS = (0, 1, 2, 4, 8)


def sinks(run: Run) -> Result:
    """Errors and perplexity against the number of exact first tokens, for both value axes, streamed.

    Returns:
        rows: keys per channel, values on each axis; tokens: attention received and the norm of the value vector
        (times the median of its head), each token's mean over layers and heads; synthetic: `synthetic`.
    """
    policies = {f"V {axis}, sinks {n}": run.policy("per_channel", axis, f"sinks={n},prefill=streamed")
                for axis in AXES for n in SINKS}
    return {"rows": errors_and_perplexity(run, policies), "tokens": _tokens(run),
            "synthetic": synthetic(run.n_bits, run.group_size, run.seed)}


def _tokens(run: Run) -> dict[str, list[float]]:
    attention, norms = [], []

    def look(layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        attention.append(received(causal_weights(q, k, run.model.config.rope)).double().mean((0, 1)))
        norm = v.double().norm(dim=-1)  # [B, Hkv, T]
        norms.append((norm / norm.median(-1, keepdim=True).values).mean((0, 1)))
    exact_layers(run.model, run.ids, look)
    return {"attention": torch.stack(attention).mean(0).tolist(), "norm": torch.stack(norms).mean(0).tolist()}


def synthetic(n_bits: int = 2, group_size: int = 32, seed: int = 0) -> list[dict]:
    """Gaussian values and sparse attention, without and with a sink of short value that takes a share of it.

    Sparse attention alone does not separate the axes; a token with much attention and a short value does.

    Returns:
        one row per share of attention on the sink and per axis: stored and consumed error in percent, and the
        consumed one with the sink kept exact.
    """
    random, T, D = torch.Generator().manual_seed(seed), 8 * group_size, 4 * group_size
    values = torch.randn(T, D, generator=random, dtype=torch.float64)
    peaks = torch.softmax(4 * torch.randn(64, T - 1, generator=random, dtype=torch.float64), -1)  # 64 queries
    rows = []
    for share in (0.0, 0.5, 0.9):
        v = values.clone()
        if share:
            v[0] *= 0.03
        weights = torch.cat([torch.full((64, 1), share, dtype=torch.float64), peaks * (1 - share)], dim=1)

        def spared(x: Tensor, weights: Tensor = weights, v: Tensor = v) -> Tensor:
            return weights @ torch.cat([v[:1], x[1:]])
        for axis in AXES:
            quantizer = UniformQuantizer(n_bits, axis, group_size)
            stored, consumed = consumed_error(v, lambda x, weights=weights: weights @ x, quantizer)
            rows.append({"name": f"V {axis}, {share:.0%} on the sink", "share": share, "value_axis": axis,
                         "value_error": stored, "output_error": consumed,
                         "output_error_sink_exact": consumed_error(v, spared, quantizer)[1]})
    return rows


def findings(result: Result) -> list[str]:
    by_name = {row["name"]: row for row in result["rows"]}
    gap = {n: [by_name[f"V {axis}, sinks {n}"]["output_error"] for axis in AXES] for n in SINKS}
    costs = {n: [by_name[f"V {axis}, sinks {n}"]["perplexity"] for axis in AXES] for n in SINKS}
    first, *rest = result["tokens"]["attention"]
    by_share = {(row["share"], row["value_axis"]): row for row in result["synthetic"]}
    apart = {share: by_share[share, "per_channel"]["output_error"] / by_share[share, "per_token"]["output_error"]
             for share in (0.0, 0.9)}
    def pair(figures: list[float]) -> str:
        return f"{figures[0]:.1f} / {figures[1]:.1f}"
    return [f"Values per token / per channel: output error {pair(gap[0])}%, with one exact sink {pair(gap[1])}%; "
            f"perplexity {pair(costs[0])}, then {pair(costs[1])}.",
            f"The first token gets {first:.0%} of a query's attention (the next most {max(rest):.0%}) and its value is "
            f"{result['tokens']['norm'][0]:.2f} times as long as the median one.",
            f"Synthetic: with sparse attention alone per channel is {apart[0.0]:.2f} times as bad as per token, with "
            f"90% of the attention on a short sink {apart[0.9]:.0f} times."]
