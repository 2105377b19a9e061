"""What a cache does to the model's work: perplexity, generation, and multiple choice as the control.

Perplexity in one call tests what that call's queries see (`prefill`); recall generates one token at a
time from the compressed cache, as in use. Next file: `instructions.py`.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import resources

import torch
import torch.nn.functional as F
from torch import Tensor

from kvmini.attention import View
from kvmini.cache import CachePolicy, KVCache
from kvmini.errors import KvminiError, count_of
from kvmini.model import Llama, generate
from kvmini.rope import Rope
from kvmini.tokenizer import Tokenizer

PASSAGE, CUE, ANSWER = 192, 24, 48  # tokens of a recall item: read, repeated as the question, to be continued
SEPARATOR = "\n\n"
STEPS = (1, 2, 5, 10)  # of counting items, the ones that the default model can do
BEFORE = 64  # tokens of text before a counting item or a question
SHOWN, ASKED = 10, 5  # numbers of a counting item: read, to be written


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


def counting_items(tokenizer: Tokenizer, text: str, n_items: int = 60, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Counting on by a fixed step, in numbers of three digits: "110, 115, 120," and so on; what follows?

    Each number depends on the ones just written, so it is lost where the recent tokens are. Some tokens of `text`
    stand before, so that there is something to forget.

    Shapes:
        prompts `[n_items, P]`, text and 10 numbers; answers `[n_items, A]`, 5 numbers. No two items have start and
        step alike, and the steps take turns.
    Raises:
        KvminiError if the tokenizer makes too few items of equal length.
    """
    starts = [torch.randperm(900 - (SHOWN + ASKED) * step, generator=torch.Generator().manual_seed(seed)) + 100
              for step in STEPS]
    by_length: dict[tuple[int, int], list[tuple[list[int], list[int]]]] = {}
    for i in range(4 * count_of(n_items, "n_items", highest=400)):
        step = STEPS[i % len(STEPS)]
        numbers = [f"{int(starts[i % len(STEPS)][i // len(STEPS)]) + n * step}," for n in range(SHOWN + ASKED)]
        prompt = [*_before(tokenizer, text), *tokenizer.encode(" ".join(numbers[:SHOWN]))]
        answer = continuation(tokenizer, " ".join(numbers[:SHOWN]), " " + " ".join(numbers[SHOWN:]))
        by_length.setdefault((len(prompt), len(answer)), []).append((prompt, answer))
    items = max(by_length.values(), key=len)[:n_items]
    if len(items) < n_items:
        raise KvminiError(f"counting needs {n_items} items of equal length: this tokenizer makes {len(items)}")
    return torch.tensor([prompt for prompt, _ in items]), torch.tensor([answer for _, answer in items])


def continuation(tokenizer: Tokenizer, before: str, after: str) -> list[int]:
    """The tokens of `after` as they follow `before`; a tokenizer may write a text's first word in another way."""
    start, whole = tokenizer.encode(before), tokenizer.encode(before + after)
    return whole[len(start):] if whole[:len(start)] == start else tokenizer.encode(after)


def _before(tokenizer: Tokenizer, text: str) -> list[int]:
    return [*tokenizer.encode(text)[:BEFORE], *tokenizer.encode(SEPARATOR)]


@torch.no_grad()
def filled(model: Llama, prompts: Tensor, policies: Iterable[CachePolicy | None]) -> Iterator[KVCache]:
    """For one policy (None: exact) after the other, a cache that was given all of the prompts `[N, P]`.

    The prompts go through the model once, exactly, and are handed to every policy's cache.
    """
    recorder = _Recorder(model.config.n_layers, model.config.rope)
    model(prompts, recorder, last_only=True)
    given = recorder.given
    del recorder
    for policy in policies:
        cache = model.new_cache(policy)
        for layer, tensors in enumerate(given):
            cache.append(layer, *tensors)
        yield cache


class _Recorder(KVCache):
    """An exact cache that remembers what each layer's `append` was given."""

    def __init__(self, n_layers: int, rope: Rope):
        super().__init__(n_layers, rope)
        self.given: list[tuple[Tensor, Tensor, Tensor | None]] = []

    def append(self, layer: int, k: Tensor, v: Tensor, layer_input: Tensor | None = None) -> tuple[View, View]:
        self.given.append((k, v, layer_input))
        return super().append(layer, k, v, layer_input)


def right_tokens(model: Llama, prompts: Tensor, answers: Tensor,
                 policies: Iterable[CachePolicy | None]) -> Iterator[Tensor]:
    """Which tokens of each answer the model gives, generating greedily by itself, one policy after the other.

    Shapes:
        prompts `[N, P]`, answers `[N, A]` -> for each policy bool `[N, A]`
    """
    for cache in filled(model, prompts[:, :-1], policies):
        yield generate(model, prompts[:, -1:], cache, max_new_tokens=answers.shape[1]) == answers


def recall(model: Llama, prompts: Tensor, answers: Tensor, policies: Iterable[CachePolicy | None]) -> Iterator[Tensor]:
    """Share of each answer that the model gives: for each policy `[N]`."""
    return (right.double().mean(1) for right in right_tokens(model, prompts, answers, policies))


def counting(model: Llama, prompts: Tensor, answers: Tensor,
             policies: Iterable[CachePolicy | None]) -> Iterator[Tensor]:
    """Share of each answer that is right up to its first wrong token: for each policy `[N]`."""
    return (right.long().cumprod(1).double().mean(1) for right in right_tokens(model, prompts, answers, policies))


@dataclass(frozen=True)
class Choice:
    """A multiple-choice item as token ids: the prompt, its options, and which one is right."""

    prompt: list[int]
    options: list[list[int]]
    answer: int


def choice_items(tokenizer: Tokenizer, text: str) -> list[list[Choice]]:
    """The project's own 120 items of common knowledge, four options each; those of equal prompt length together.

    Some tokens of `text` stand before each question: alone, a question is shorter than two groups of 32, so that a
    per_channel side would quantize little or nothing of it.
    """
    items = json.loads((resources.files("kvmini") / "data" / "choices.json").read_text(encoding="utf-8"))
    by_length: dict[int, list[Choice]] = {}
    for item in items:
        question = f"Question: {item['question']}\nAnswer:"
        prompt = [*_before(tokenizer, text), *tokenizer.encode(question)]
        options = [continuation(tokenizer, question, f" {option}") for option in item["options"]]
        by_length.setdefault(len(prompt), []).append(Choice(prompt, options, item["answer"]))
    return list(by_length.values())


@torch.no_grad()
def choose(model: Llama, items: list[Choice], policies: Iterable[CachePolicy | None]) -> Iterator[list[bool]]:
    """Which items each policy gets right: the likeliest option (sum of log p), scored after the prompt was handed over.

    The items' prompts must be equally long. Options see themselves exactly, whatever the policy's `prefill`.
    """
    policies = [policy and replace(policy, prefill="exact") for policy in policies]
    prompts = torch.tensor([item.prompt for item in items])
    for cache in filled(model, prompts[:, :-1], policies):
        cache.reorder([i for i, item in enumerate(items) for _ in item.options])
        yield _right(model, items, cache, before=1)


@torch.no_grad()
def choose_in_one_call(model: Llama, items: list[Choice], policy: CachePolicy | None) -> list[bool]:
    """The same with prompt and option in one call, prefill "exact": it sees nothing stored, whatever the policy."""
    policy = policy and replace(policy, prefill="exact")
    return _right(model, items, model.new_cache(policy), before=len(items[0].prompt))


def _right(model: Llama, items: list[Choice], cache: KVCache, before: int) -> list[bool]:
    """Score every option behind the last `before` tokens of its prompt; the cache has seen the others."""
    options = [option for item in items for option in item.options]
    longest = max(map(len, options))
    rows = torch.tensor([item.prompt[-before:] + option + [0] * (longest - len(option))  # what follows is not seen
                         for item in items for option in item.options])
    logits = model(rows[:, :-1], cache)[:, before - 1:]  # the last token has nothing to predict
    losses = F.cross_entropy(logits.mT, rows[:, before:], reduction="none")
    sums = torch.stack([row[:len(option)].sum() for row, option in zip(losses, options, strict=True)])
    best = sums.view(len(items), -1).argmin(-1).tolist()
    return [choice == item.answer for choice, item in zip(best, items, strict=True)]
