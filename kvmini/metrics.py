"""Errors, each taken twice: on the stored tensor, and where attention consumes it.

    keys     stored: k against k_hat      consumed: attention weights, exact queries
    values   stored: v against v_hat      consumed: attention output, exact weights

An error is |x - x_hat| / |x| in percent, one Frobenius norm per head over its matrix; mean over heads,
then over layers. The stored error is over all tokens of the final cache (exact windows count as error
0); the consumed one is over what each query really sees. Next file: `phenomena.py`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvmini.attention import CHUNK, View, attention_weights, weighted_sum
from kvmini.cache import CachePolicy, KVCache
from kvmini.errors import KvminiError
from kvmini.model import Llama
from kvmini.quantizers.base import Quantizer
from kvmini.rope import Rope

ERRORS = ("key_error", "score_error", "value_error", "output_error")


class Tap(KVCache):
    """An exact cache that shows each call's unrotated q, k and v before it attends.

    Example:
        >>> tap = Tap(1, Rope(8), lambda layer, q, k, v: print(layer, tuple(k.shape)))
        >>> _ = tap.attend(0, torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8), torch.randn(1, 1, 3, 8))
        0 (1, 1, 3, 8)
    """

    def __init__(self, n_layers: int, rope: Rope, on_attend: Callable[[int, Tensor, Tensor, Tensor], None]):
        super().__init__(n_layers, rope)
        self.on_attend = on_attend

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, layer_input: Tensor | None = None) -> Tensor:
        self.on_attend(layer, q, k, v)
        return super().attend(layer, q, k, v, layer_input)


def relative_error(x: Tensor, x_hat: Tensor) -> Tensor:
    """|x - x_hat|_F / |x|_F of the last two dimensions, in percent.

    Shapes:
        `[..., T, D]` twice -> `[...]`
    Example:
        >>> relative_error(torch.full((2, 2), 4.0), torch.full((2, 2), 5.0)).item()
        25.0
    """
    return _percent(*frobenius(x, x_hat))


def consumed_error(x: Tensor, consumer: Callable[[Tensor], Tensor], quantizer: Quantizer) -> tuple[float, float]:
    """The error that a quantizer makes in any tensor, stored, and in what any function makes of it, consumed.

    Both are relative errors in percent, one norm over the last two dimensions, averaged over the others.

    Shapes:
        x `[..., T, D]`; consumer takes that and may return any `[..., M, N]`
    Example:
        >>> from kvmini import UniformQuantizer
        >>> x = torch.tensor([[0.0, 1.0, 2.0, 10.0]])
        >>> first_half = lambda x: x[..., :2]                       # a consumer that never looks at the 10
        >>> stored, consumed = consumed_error(x, first_half, UniformQuantizer(2, "per_token", 4))
        >>> round(stored), round(consumed)
        (16, 100)
    """
    x_hat = quantizer.dequantize(quantizer.quantize(x))
    return relative_error(x, x_hat).mean().item(), relative_error(consumer(x), consumer(x_hat)).mean().item()


def frobenius(x: Tensor, x_hat: Tensor) -> tuple[Tensor, Tensor]:
    """Squares of the error and of the tensor, summed over the last two dimensions: the measure of rule and tables."""
    wide = torch.promote_types(x.dtype, torch.float32)  # a difference of float16 may leave float16
    return _energy(x_hat.to(wide) - x.to(wide)), _energy(x)


def elementwise(x: Tensor, x_hat: Tensor, guard: float = 0.01) -> tuple[Tensor, Tensor]:
    """Squares of (x - x_hat) / x, summed, and how many elements are not 0: the measure that KIVI's table writes.

    As written it has no bound where x is near 0, so |x| counts as at least `guard` times the norm of its row
    (last dimension); elements that are exactly 0, such as masked weights, are left out. The root of the mean
    is reported; the norm of the paper grows with the number of elements.

    Source:
        KIVI (arXiv 2402.02750), Table 2, which says neither guard nor number of elements.
    """
    x, x_hat = x.double(), x_hat.double()
    floor = guard * torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    ratio = torch.where(x == 0, 0, (x - x_hat) / torch.maximum(x.abs(), floor))
    return ratio.square().sum((-2, -1)), (x != 0).sum((-2, -1)).double()


@torch.no_grad()
def head_errors(layer: int, q: Tensor, k: Tensor, v: Tensor, caches: Sequence[KVCache],
                measure: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = frobenius) -> Tensor:
    """The four errors that each of some empty caches makes on one layer's tensors, given in one call.

    Shapes:
        q `[B, H, S, D]`, k and v `[B, Hkv, S, D]`, unrotated -> float64 `[caches, 4, Hkv]`, in the order of
        ERRORS; what the query heads of one key/value head consume is averaged over them.
    Raises:
        KvminiError if a cache already holds tokens of that layer.
    Source:
        KIVI (arXiv 2402.02750), Table 2; norms per head as stated at the top of this file.
    """
    if not caches or any(cache.values[layer].length for cache in caches):
        raise KvminiError("errors are measured from the first token on: give caches, and empty ones")
    S, rope = q.shape[-2], caches[0].rope
    views = [cache.append(layer, k, v) for cache in caches]
    stored = [cache.read(layer) for cache in caches]
    q, k = rope.apply(q, range(S)), rope.apply(k, range(S))
    sums = torch.zeros(len(caches), 2, 2, *q.shape[:2], dtype=torch.float64, device=q.device)  # weights, output
    for start in range(0, S, CHUNK):
        stop = min(S, start + CHUNK)
        weights = attention_weights(q[..., start:stop, :], View(k[..., :stop, :]), start)
        output = weighted_sum(weights, View(v[..., :stop, :]))
        for i, (keys, values) in enumerate(views):
            seen = attention_weights(q[..., start:stop, :], keys.rows(start, stop, stop), start)
            sums[i, 0] += torch.stack(measure(weights, seen))
            sums[i, 1] += torch.stack(measure(output, weighted_sum(weights, values.rows(start, stop, stop))))
    errors = []
    for (k_hat, v_hat), (weights, output) in zip(stored, sums, strict=True):
        found = [_percent(*measure(k, k_hat)), _percent(*weights), _percent(*measure(v, v_hat)), _percent(*output)]
        errors.append(torch.stack([x.unflatten(1, (k.shape[1], -1)).mean((0, 2)) for x in found]))
    return torch.stack(errors)


def layer_errors(layer: int, q: Tensor, k: Tensor, v: Tensor, caches: Sequence[KVCache]) -> Tensor:
    """`head_errors`, averaged over heads: float64 `[caches, 4]`."""
    return head_errors(layer, q, k, v, caches).mean(-1)


@torch.no_grad()
def errors(model: Llama, ids: Tensor, policies: Sequence[CachePolicy]) -> list[dict[str, float]]:
    """The four errors of each policy on a text, in percent, averaged over heads, then layers.

    One exact run feeds all policies. The policy's own `prefill` says what a query sees; with "exact" a
    single call sees nothing stored and the consumed errors are 0, so give "streamed" or "all".

    Shapes:
        ids `[B, T]` -> per policy {key_error, score_error, value_error, output_error}
    """
    caches = [model.new_cache(policy) for policy in policies]
    layers = []
    tap = Tap(model.config.n_layers, model.config.rope,
              lambda layer, q, k, v: layers.append(layer_errors(layer, q, k, v, caches)))
    model(ids, tap, last_only=True)
    return [dict(zip(ERRORS, row, strict=True)) for row in torch.stack(layers).mean(0).tolist()]


def _energy(x: Tensor) -> Tensor:
    # Norms in float64: the square of a float16 key may be past float16, or vanish.
    return torch.linalg.vector_norm(x, dim=(-2, -1), dtype=torch.float64).square()


def _percent(off: Tensor, energy: Tensor) -> Tensor:
    return 100 * torch.where(off == 0, 0, off / energy).sqrt()  # nothing off of nothing is no error
