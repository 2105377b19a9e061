"""What a model's keys and values are on a text that is never the one under test.

Several methods want to know beforehand where numbers lie: KVQuant its ranges, levels and thresholds, RotateKV its
order of channels and its sinks, InnerQ its factors, FP8 its scales. A `Calibration` is all that they learn from:
keys and values as the layers made them, and how much the loss minds an error of each. Methods take from it what they
want (`policies.py`), so nothing is hidden in a method. Tokens with massive activations are left out, for they are
kept exact. Saving and loading are in `files.py`. Next file: `spellings.py`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvmini.errors import KvminiError
from kvmini.metrics import Tap
from kvmini.model import Llama
from kvmini.phenomena import massive, residual_stream

PASSAGE = 512  # tokens of a passage
MASSIVE = 1000  # times the median of the hidden state; at most so many first tokens are looked at:
FIRST = 8


@dataclass(frozen=True, eq=False)
class Calibration:
    """Keys and values of some passages, unrotated, and the squared gradients of the loss at them.

    Shapes:
        keys, values float16, and key_gradients, value_gradients bfloat16, all `[L, Hkv, T, D]`; `sinks` is the
        number of first tokens of a passage that are left out; key_weight, value_weight `[L, Hkv * D, hidden]` and
        key_bias, value_bias `[L, Hkv * D]` are the projections.
    Example:
        >>> from kvmini import Config, Rope
        >>> model = Llama(Config(2, 4, 2, 8, 32, 64, 100, 64, 1e-5, Rope(8)))
        >>> calibrate(model, torch.arange(90)[None], passage=40).keys.shape      # the second passage ends at 80
        torch.Size([2, 2, 80, 8])
    """

    keys: Tensor
    values: Tensor
    key_gradients: Tensor
    value_gradients: Tensor
    key_weight: Tensor
    value_weight: Tensor
    key_bias: Tensor
    value_bias: Tensor
    sinks: int

    def of(self, side: str, layer: int) -> tuple[Tensor, Tensor]:
        """Numbers and squared gradients of side "k" or "v" of a layer, float32 `[Hkv, T, D]`."""
        x, gradients = ((self.keys, self.key_gradients) if side == "k" else (self.values, self.value_gradients))
        return x[layer].float(), gradients[layer].float()

    def projection(self, side: str, layer: int) -> tuple[Tensor, Tensor]:
        """Weight `[Hkv * D, hidden]` and bias `[Hkv * D]` of side "k" or "v" of a layer."""
        if side == "k":
            return self.key_weight[layer], self.key_bias[layer]
        return self.value_weight[layer], self.value_bias[layer]

    def is_of(self, model: Llama) -> bool:
        """Whether it was made on this model: one with the same key projections."""
        weights = _projections(model, "k")[0]
        return self.key_weight.shape == weights.shape and torch.equal(self.key_weight, weights)

    @property
    def n_layers(self) -> int:
        return self.keys.shape[0]


def calibrate(model: Llama, ids: Tensor, passage: int = PASSAGE) -> Calibration:
    """Run the model, and the gradient of its loss, on passages of a text.

    Shapes:
        ids `[1, T]`, cut into whole passages; what is left over is not used.
    Raises:
        KvminiError for less than one passage.
    """
    if passage <= FIRST or ids.shape[1] < passage:
        raise KvminiError(f"a calibration needs passages of more than {FIRST} tokens and at least one of them: "
                          f"{ids.shape[1]} tokens make no passage of {passage}")
    passages = ids[0, :ids.shape[1] // passage * passage].view(-1, passage)
    sinks = max(massive_tokens(model, row[None]) for row in passages)
    parts: list[list[Tensor]] = [[], [], [], []]
    for row in passages:
        layers = _with_gradients(model, row[None])
        for part, found in zip(parts, zip(*layers, strict=True), strict=True):
            part.append(torch.stack(found)[..., sinks:, :])
    keys, values, key_gradients, value_gradients = (torch.cat(part, dim=-2) for part in parts)
    (key_weight, key_bias), (value_weight, value_bias) = _projections(model, "k"), _projections(model, "v")
    return Calibration(keys.half(), values.half(), key_gradients.bfloat16(), value_gradients.bfloat16(), key_weight,
                       value_weight, key_bias, value_bias, sinks)


def _projections(model: Llama, side: str) -> tuple[Tensor, Tensor]:
    """Weights and biases, float32, of side "k" or "v" of all layers; without a bias it is 0."""
    linears = [getattr(layer.attention, side) for layer in model.layers]
    biases = [torch.zeros(x.out_features) if x.bias is None else x.bias.detach().float() for x in linears]
    return torch.stack([x.weight.detach().float() for x in linears]), torch.stack(biases)


def massive_tokens(model: Llama, ids: Tensor) -> int:
    """How many first tokens it takes to have all massive activations among the first 8: `[1, T]` -> 0 .. 8.

    Source:
        RotateKV (arXiv 2501.16383) finds sinks this way, without an attention map; Massive Activations (2402.17762).
    """
    states = [state[0] for state in residual_stream(model, ids)]
    return max((int(row["token"]) + 1 for row in massive(states, MASSIVE) if row["token"] < FIRST), default=0)


def _with_gradients(model: Llama, ids: Tensor) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """For each layer k, v and the squared gradients of the summed loss at them, `[Hkv, T, D]`."""
    made: list[tuple[Tensor, Tensor]] = []

    def keep(layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        k.retain_grad()
        v.retain_grad()
        made.append((k, v))
    hook = model.embedding.register_forward_hook(lambda module, given, out: out.requires_grad_())
    frozen = [(p, p.requires_grad) for p in model.parameters()]
    try:
        for p, _ in frozen:
            p.requires_grad_(False)  # only keys and values are asked for
        with torch.enable_grad():
            logits = model(ids, Tap(model.config.n_layers, model.config.rope, keep))
            F.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="sum").backward()
    finally:
        hook.remove()
        for p, before in frozen:
            p.requires_grad_(before)
    return [(k.detach()[0], v.detach()[0], k.grad[0].square(), v.grad[0].square()) for k, v in made]


def pair_factors(k: Tensor) -> Tensor:
    """InnerQ's factors, one for both channels of a RoPE pair, so that they commute with the rotation.

    The length of a pair is the same before RoPE and after, so unrotated keys will do.

    Shapes:
        k `[Hkv, T, D]` -> `[Hkv, 1, D]`
    Example:
        >>> pair_factors(torch.tensor([[[3.0, 0.0, 4.0, 0.0]]])).tolist()
        [[[2.2360680103302, 1.0, 2.2360680103302, 1.0]]]
    """
    first, second = k.float().chunk(2, dim=-1)
    longest = torch.hypot(first, second).amax(-2, keepdim=True).sqrt()
    return torch.where(longest > 0, longest, 1).repeat(1, 1, 2)


@contextmanager
def folded(model: Llama, factors: list[Tensor]) -> Iterator[Llama]:
    """Within the block the model makes keys divided by each layer's factors, and queries multiplied by them.

    Nothing is left to do in a step, and the logits stay what they were. That is exact only for factors which both
    channels of a RoPE pair share; windows and sinks then hold divided keys, too.

    Shapes:
        factors: one `[Hkv, 1, D]` per layer
    Raises:
        KvminiError for factors that differ within a pair.
    """
    half = model.config.head_dim // 2
    if any(not torch.equal(f[..., :half], f[..., half:]) for f in factors):
        raise KvminiError("factors that differ within a RoPE pair do not commute with the rotation: tie them")
    shared = model.config.n_heads // model.config.n_kv_heads
    changed: list[tuple[Tensor, Tensor]] = []
    try:
        with torch.no_grad():
            for layer, factor in zip(model.layers, factors, strict=True):
                factor = factor.double()  # float32 would not have its inverse
                rows = {layer.attention.k: 1 / factor.flatten(),
                        layer.attention.q: factor.repeat_interleave(shared, dim=0).flatten()}
                for linear, times in rows.items():
                    for parameter in linear.parameters():
                        changed.append((parameter, parameter.detach().clone()))
                        parameter.mul_(times.to(parameter).view(-1, *[1] * (parameter.ndim - 1)))
        yield model
    finally:
        with torch.no_grad():
            for parameter, before in changed:
                parameter.copy_(before)
