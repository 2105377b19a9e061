"""Massive activations: single numbers of the residual stream, on the sink tokens, that act as biases.

Next file: `experiments/key_order.py`.
"""

import torch
from torch import Tensor

from kvmini.evaluate import perplexity
from kvmini.experiments.run import Result, Run
from kvmini.phenomena import causal_weights, exact_layers, massive, received, replaced, residual_stream
from kvmini.texts import prose

RATIO = 1000  # times the median; the source asks for a magnitude above 100 as well
OTHERS = 8  # sequences of other text that the mean is taken over


def massive_activations(run: Run) -> Result:
    """Where they are, where attention falls, and what is lost without them.

    Returns:
        rows: largest magnitude over the median by layer, with its token, dimension, and the share of attention
        that the token gets in the next layer; effects: perplexity as it is, with the massive numbers set to
        zero, set to their mean over the beginnings of other texts, and with ordinary numbers (the same
        dimensions, other tokens) set to zero.
    """
    attention: list[Tensor] = []
    exact_layers(run.model, run.ids, lambda layer, q, k, v: attention.append(
        received(causal_weights(q, k, run.model.config.rope)).mean((0, 1))))
    states = [state[0] for state in residual_stream(run.model, run.ids)]
    rows = []
    for layer, state in enumerate(states):
        size = state.abs()
        token, dimension = divmod(int(size.argmax()), state.shape[1])
        follows = attention[layer + 1] if layer + 1 < len(states) else None
        rows.append({"layer": layer, "token": token, "text": run.tokenizer.decode([int(run.ids[0, token])]),
                     "dimension": dimension, "value": state[token, dimension].item(), "median": size.median().item(),
                     "ratio": (size.max() / size.median()).item(),
                     "attention": None if follows is None else follows[token].item(),
                     "most_attention_on": None if follows is None else int(follows.argmax())})
    return {"rows": rows, "effects": _effects(run, states)}


def _effects(run: Run, states: list[Tensor]) -> list[dict]:
    found = massive(states, RATIO)
    places = [(row["layer"], row["token"], row["dimension"]) for row in found]
    other = torch.tensor(run.tokenizer.encode(prose("calibration")))
    stride = len(other) // OTHERS
    beginnings = [[state[0] for state in residual_stream(run.model, other[None, i * stride:i * stride + 64])]
                  for i in range(OTHERS)]
    # The mean of what stands at the sink of other texts; a massive token elsewhere gets the same number.
    mean = {(layer, token, c): sum(s[layer][0, c].item() for s in beginnings) / OTHERS for layer, token, c in places}
    random = torch.Generator().manual_seed(run.seed)
    others = torch.randint(1, run.ids.shape[1], (len(places),), generator=random).tolist()
    ordinary = {(layer, token, c): 0.0 for (layer, _, c), token in zip(places, others, strict=True)}
    changes = {"as it is": {}, "set to zero": dict.fromkeys(places, 0.0), "set to their mean over other texts": mean,
               "the same dimensions of other tokens set to zero": ordinary}
    rows = []
    for name, numbers in changes.items():
        with replaced(run.model, numbers):
            rows.append({"name": name, "changed": len(numbers),
                         "perplexity": perplexity(run.model, run.ids, run.model.new_cache())})
    return rows


def on_the_sink(result: Result) -> tuple[int, int]:
    """In how many of the layers with a massive activation its token gets most attention in the next layer."""
    layers = [row for row in result["rows"] if row["ratio"] >= RATIO and row["attention"] is not None]
    return sum(row["token"] == row["most_attention_on"] for row in layers), len(layers)


def findings(result: Result) -> list[str]:
    top = max(result["rows"], key=lambda row: row["ratio"])
    whole, zero, mean, _ = result["effects"]
    on_sink, of = on_the_sink(result)
    if not zero["changed"]:
        return [f"No number is {RATIO} times the median here; the largest is {top['ratio']:.0f} times (layer "
                f"{top['layer']})."]
    return [f"The largest number of the residual stream is {abs(top['value']):,.0f}, {top['ratio']:,.0f} times the "
            f"median (layer {top['layer']}, token {top['token']}, dimension {top['dimension']}); in {on_sink} of the "
            f"{of} layers that have one above {RATIO:,} times, its token is the one that gets most "
            f"attention in the next layer.",
            f"Perplexity {whole['perplexity']:.1f}; with these {zero['changed']} numbers zero "
            f"{zero['perplexity']:,.0f}, with their mean over other texts {mean['perplexity']:.1f}."]
