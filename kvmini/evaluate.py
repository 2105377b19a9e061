"""What a cache does to the model's work: perplexity, and verbatim recall by generation.

Perplexity in one call tests what that call's queries see (`prefill`); recall generates one token at a
time from the compressed cache, as in use. Next file: `experiments.py`.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kvmini.cache import CachePolicy, KVCache
from kvmini.errors import KvminiError, count_of
from kvmini.metrics import Tap
from kvmini.model import Llama, generate
from kvmini.tokenizer import Tokenizer

PASSAGE, CUE, ANSWER = 192, 24, 48  # tokens of a recall item: read, repeated as the question, to be continued
SEPARATOR = "\n\n"


@torch.no_grad()
def log_losses(model: Llama, ids: Tensor, cache: KVCache, chunk: int | None = None) -> Tensor:
    """-log p of tokens 1 .. T-1, through `cache`: in one call, or `chunk` tokens at a time.

    Shapes:
        ids `[B, T]` -> float64 `[B, T - 1]`; the cache goes on by T tokens from where it is.
    """
    losses, seen = [], 0
    for part in ids.split(chunk or ids.shape[1], dim=1):
        seen += part.shape[1]
        logits, targets = model(part, cache), ids[:, seen - part.shape[1] + 1:seen + 1]
        for start in range(0, targets.shape[1], 128):  # the softmax of all rows at once would double the memory
            rows = slice(start, min(start + 128, targets.shape[1]))
            loss = F.cross_entropy(logits[:, rows].flatten(0, 1), targets[:, rows].flatten(), reduction="none")
            losses.append(loss.view(ids.shape[0], -1).double())
    return torch.cat(losses, dim=1)


def perplexity(model: Llama, ids: Tensor, cache: KVCache, chunk: int | None = None) -> float:
    """exp of the mean of `log_losses`: over tokens 1 .. T-1, no begin token added.

    In one call a policy with prefill "exact" quantizes nothing that is seen: its perplexity is then that of
    the exact cache. Give a chunk, or prefill "streamed".

    Raises:
        KvminiError for fewer than two tokens.
    """
    if ids.shape[1] < 2:
        raise KvminiError("perplexity needs at least two tokens: the first one is never predicted")
    return log_losses(model, ids, cache, chunk).mean().exp().item()


def recall_items(tokenizer: Tokenizer, text: str, n_items: int = 20, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Verbatim recall: a passage, a separator, the passage's first tokens again; the answer is what follows.

    Shapes:
        prompts `[n_items, 192 + separator + 24]`, answers `[n_items, 48]`. Passages are spread evenly over
        the text; the seed shifts them.
    Raises:
        KvminiError if the text is too short for passages that differ.
    """
    ids = torch.tensor(tokenizer.encode(text))
    shortest = PASSAGE + count_of(n_items, "n_items")
    if len(ids) < shortest:
        raise KvminiError(f"{n_items} different passages need a text of at least {shortest} tokens, not {len(ids)}")
    stride = (len(ids) - PASSAGE) / n_items
    shift = torch.rand((), generator=torch.Generator().manual_seed(seed)).item() * stride
    passages = torch.stack([ids[start:start + PASSAGE] for start in (int(i * stride + shift) for i in range(n_items))])
    separator = torch.tensor(tokenizer.encode(SEPARATOR)).expand(n_items, -1)
    return torch.cat([passages, separator, passages[:, :CUE]], dim=1), passages[:, CUE:CUE + ANSWER]


@torch.no_grad()
def recall(model: Llama, prompts: Tensor, answers: Tensor, policies: Iterable[CachePolicy | None]) -> Iterator[Tensor]:
    """Share of each answer that the model gives, one policy (None: exact) after the other.

    All but the last prompt token go through the model once, exactly, and are handed to every policy's
    cache; from there on each generates greedily by itself.

    Shapes:
        prompts `[N, P]`, answers `[N, A]` -> for each policy the shares `[N]`
    """
    layers: list[tuple[Tensor, Tensor]] = []
    tap = Tap(model.config.n_layers, model.config.rope, lambda layer, q, k, v: layers.append((k, v)))
    model(prompts[:, :-1], tap, last_only=True)
    del tap
    for policy in policies:
        cache = model.new_cache(policy)
        for layer, (k, v) in enumerate(layers):
            cache.append(layer, k, v)
        given = generate(model, prompts[:, -1:], cache, max_new_tokens=answers.shape[1])
        yield (given == answers).double().mean(1)
