"""What keys, values, attention and the residual stream look like: why the axes matter at all.

    attention    how sparse it is, and on which tokens it falls (sinks)
    keys         which channels are large, at which tokens, in which heads
    residual     massive activations: single numbers of the hidden state, thousands of times the median

Nothing is quantized here. Next file: `quantizers/exact.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kvmini.attention import View, attention_weights
from kvmini.metrics import Tap
from kvmini.model import Llama
from kvmini.rope import Rope


@torch.no_grad()
def exact_layers(model: Llama, ids: Tensor, look: Callable[[int, Tensor, Tensor, Tensor], None]) -> None:
    """Run the model exactly and show each layer's unrotated q `[B, H, T, D]`, k and v `[B, Hkv, T, D]`."""
    model(ids, Tap(model.config.n_layers, model.config.rope, look), last_only=True)


def causal_weights(q: Tensor, k: Tensor, rope: Rope) -> Tensor:
    """Exact attention weights of one layer from the first token on: unrotated q, k -> `[B, H, T, T]`."""
    positions = range(q.shape[-2])
    return attention_weights(rope.apply(q, positions), View(rope.apply(k, positions)), first=0)


def sparsity(weights: Tensor, threshold: float) -> Tensor:
    """Share of the causal weights that are below a threshold.

    Shapes:
        weights `[..., T, T]` -> `[...]`
    Example:
        >>> sparsity(torch.tensor([[1.0, 0.0], [0.95, 0.05]]), threshold=0.1).item()    # 1 of 3: above the diagonal
        0.3333333333333333
    """
    T = weights.shape[-1]
    causal = torch.ones(T, T, dtype=torch.bool, device=weights.device).tril()
    return (weights[..., causal] < threshold).double().mean(-1)


def received(weights: Tensor) -> Tensor:
    """The share of all queries' attention that falls on each token: `[..., T, T]` -> `[..., T]`; it sums to 1.

    Example:
        >>> received(torch.tensor([[1.0, 0.0], [0.75, 0.25]])).tolist()
        [0.875, 0.125]
    """
    return weights.mean(-2)


def largest_channels(x: Tensor, n: int) -> Tensor:
    """The n channels of each head with the largest mean magnitude, as a mask.

    Shapes:
        x `[..., T, D]` -> bool `[..., D]`
    Example:
        >>> largest_channels(torch.tensor([[1.0, -9.0, 2.0], [0.0, 8.0, 3.0]]), n=2).tolist()
        [False, True, True]
    """
    magnitude = x.abs().mean(-2)
    return torch.zeros_like(magnitude, dtype=torch.bool).scatter(-1, magnitude.topk(n).indices, True)


def persistence(x: Tensor, n: int) -> Tensor:
    """How fixed the large channels are: the share of each token's n largest that are among the head's n largest.

    1 where every token has the same ones; n / D by chance.

    Shapes:
        x `[..., T, D]` -> `[...]`
    """
    at_token = torch.zeros_like(x, dtype=torch.bool).scatter(-1, x.abs().topk(n).indices, True)
    return (at_token & largest_channels(x, n)[..., None, :]).double().sum(-1).mean(-1) / n


def overlap(masks: Tensor) -> float:
    """The share of marked channels that two different heads have in common, over all pairs: `[heads, D]`.

    Example:
        >>> overlap(torch.tensor([[True, True, False], [True, False, True]]))
        0.5
    """
    marked = masks.double()
    shared, n = marked @ marked.T, marked.shape[0]
    return ((shared.sum() - shared.trace()) / (n * (n - 1)) / marked.sum(-1).mean()).item()


@torch.no_grad()
def residual_stream(model: Llama, ids: Tensor) -> list[Tensor]:
    """The hidden state after each layer, `[B, T, hidden]`."""
    states: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda layer, given, out: states.append(out)) for layer in model.layers]
    try:
        model(ids, last_only=True)
    finally:
        for hook in hooks:
            hook.remove()
    return states


def massive(states: Sequence[Tensor], ratio: float = 1000.0) -> list[dict[str, float]]:
    """Numbers of the residual stream whose magnitude is at least `ratio` times their hidden state's median.

    The source asks for a magnitude above 100 as well; that is left to the reader of `value`, for small models
    live on a smaller scale.

    Shapes:
        per layer `[T, hidden]` (one sequence) -> rows: layer, token, dimension, value, ratio; largest first
    Source:
        Massive Activations (arXiv 2402.17762), section 2: the state after a layer, the median over all of it.
    """
    rows = []
    for layer, state in enumerate(states):
        times = state.abs() / state.abs().median()
        rows += [{"layer": layer, "token": t, "dimension": c, "value": state[t, c].item(), "ratio": times[t, c].item()}
                 for t, c in (times >= ratio).nonzero().tolist()]
    return sorted(rows, key=lambda row: -row["ratio"])


@contextmanager
def replaced(model: Llama, numbers: dict[tuple[int, int, int], float]) -> Iterator[None]:
    """Within the block, set single numbers (layer, token, dimension) of the hidden state after a layer.

    Tokens count from the first one of a call, so run a text in one call.
    """
    def editor(layer: int) -> Callable[..., Tensor]:
        def edit(module, given, out: Tensor) -> Tensor:
            out = out.clone()
            for (_, token, dimension), value in ((place, x) for place, x in numbers.items() if place[0] == layer):
                out[:, token, dimension] = value
            return out
        return edit
    hooks = [model.layers[layer].register_forward_hook(editor(layer)) for layer in {layer for layer, _, _ in numbers}]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
