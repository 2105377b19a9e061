"""Generation tasks and multiple choice: their items, and their scores against a whole separate run."""

import pytest
import torch
from test_model import small

from kvmini import KvminiError, generate, policies
from kvmini.evaluate import (
    ANSWER,
    ASKED,
    BEFORE,
    CUE,
    PASSAGE,
    SEPARATOR,
    SHOWN,
    STEPS,
    Choice,
    choice_items,
    choose,
    choose_in_one_call,
    counting,
    counting_items,
    filled,
    recall,
    recall_items,
)
from kvmini.texts import prose


class Words:
    """A stand-in for a tokenizer in tests of bookkeeping: characters are tokens."""

    def encode(self, text):
        return [ord(c) % 50 for c in text]


def test_recall_items_ask_for_what_follows_the_cue():
    text = prose("calibration")[:3000]
    prompts, answers = recall_items(Words(), text, n_items=20, seed=1)
    separator = len(SEPARATOR)
    assert prompts.shape == (20, PASSAGE + separator + CUE) and answers.shape == (20, ANSWER)
    assert torch.equal(prompts[:, -CUE:], prompts[:, :CUE])
    assert torch.equal(answers, prompts[:, CUE:CUE + ANSWER])
    assert len({tuple(row.tolist()) for row in prompts}) == 20
    assert not torch.equal(prompts, recall_items(Words(), text, n_items=20, seed=2)[0])
    ids = Words().encode(text)
    starts = [next(i for i in range(len(ids)) if ids[i:i + 40] == row[:40].tolist()) for row in prompts]
    assert starts == sorted(starts) and starts[0] < 150 and starts[-1] > 3000 - PASSAGE - 300  # spread over the text
    with pytest.raises(KvminiError, match="212"):
        recall_items(Words(), text[:211])
    assert len({tuple(row.tolist()) for row in recall_items(Words(), text[:212])[0]}) == 20


def test_recall_generates_through_the_policys_own_cache():
    """Each share equals that of a whole, separate run: exact prefill of all but one token, then real decode."""
    model = small(context_length=400, tied=False)
    prompts, _ = recall_items(Words(), prose("calibration")[:3000], n_items=3)
    chosen = [None, policies.get("k=per_token:2:8,v=per_channel:1:8")]
    outputs = []
    for policy in chosen:
        cache = model.new_cache(policy)
        model(prompts[:, :-1], cache)
        outputs.append(generate(model, prompts[:, -1:], cache, ANSWER))
    assert len(outputs[0].unique()) > 5 and (outputs[0] != outputs[1]).any(1).all()  # not the same for any cache
    for answers in outputs:
        shares = list(recall(model, prompts, answers, chosen))
        for share, output in zip(shares, outputs, strict=True):
            assert share.tolist() == (output == answers).double().mean(1).tolist()


def text_of(ids):
    """The characters that `Words` would have made these ids of: of digits, comma and space there is one each."""
    return "".join({ord(c) % 50: c for c in "0123456789, "}.get(i, "?") for i in ids)


def test_counting_items_go_on_by_their_step_and_no_two_are_alike():
    prompts, answers = counting_items(Words(), "x" * 200, n_items=60, seed=1)
    assert prompts.shape == (60, BEFORE + 2 + 5 * SHOWN - 1) and answers.shape == (60, 5 * ASKED)
    steps = []
    for prompt, answer in zip(prompts.tolist(), answers.tolist(), strict=True):
        numbers = [int(n) for n in text_of(prompt[BEFORE + 2:] + answer).rstrip(",").split(", ")]
        assert len(numbers) == SHOWN + ASKED and numbers[0] >= 100 and numbers[-1] <= 999
        steps.append(numbers[1] - numbers[0])
        assert numbers == list(range(numbers[0], numbers[-1] + 1, steps[-1]))
    assert {step: steps.count(step) for step in steps} == dict.fromkeys(STEPS, 15)
    assert len({tuple(row) for row in prompts.tolist()}) == 60
    assert not torch.equal(prompts, counting_items(Words(), "x" * 200, n_items=60, seed=2)[0])


def test_counting_is_scored_up_to_the_first_wrong_token():
    model = small(context_length=400, tied=False)
    prompts = torch.randint(0, 50, (3, 30), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache()
    model(prompts[:, :-1], cache)
    answers = generate(model, prompts[:, -1:], cache, 10)
    answers[1, 4], answers[2, 0] = (answers[1, 4] + 1) % 50, (answers[2, 0] + 1) % 50
    (prefix,), (share,) = counting(model, prompts, answers, [None]), recall(model, prompts, answers, [None])
    assert prefix.tolist() == [1.0, 0.4, 0.0] and share.tolist() == [1.0, 0.9, 0.9]


def test_filled_caches_hold_what_a_run_of_their_own_would_store():
    model = small(context_length=400)
    prompts = torch.randint(0, 50, (2, 40), generator=torch.Generator().manual_seed(0))
    chosen = [None, policies.get("k=per_channel:2:8,v=per_token:2:8,residual=8,sinks=2")]
    for policy, cache in zip(chosen, filled(model, prompts, chosen), strict=True):
        own = model.new_cache(policy)
        model(prompts, own)
        for layer in range(2):
            for a, b in zip(cache.read(layer), own.read(layer), strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["exact", "k=per_channel:2:8,v=per_token:2:8"])
def test_an_option_is_scored_as_if_it_were_alone(name):
    """Against one option at a time, prompt first and then the option, no padding."""
    model, policy, random = small(context_length=400, tied=False), policies.get(name), torch.Generator().manual_seed(2)

    def ids(n):
        return torch.randint(0, 50, (n,), generator=random).tolist()
    items = [Choice(ids(20), [ids(n) for n in lengths], answer)
             for lengths, answer in (((1, 3, 2, 5), 0), ((4, 1, 1, 2), 2), ((2, 2, 2, 2), 3))]
    wanted = []
    for item in items:
        sums = []
        for option in item.options:
            cache = model.new_cache(policy)
            model(torch.tensor([item.prompt[:-1]]), cache)
            logits = model(torch.tensor([item.prompt[-1:] + option]), cache)[0]
            losses = torch.log_softmax(logits, -1)
            sums.append(sum(losses[i, token].item() for i, token in enumerate(option)))
        wanted.append(max(range(4), key=sums.__getitem__) == item.answer)
    assert next(choose(model, items, [policy])) == wanted
    assert choose_in_one_call(model, items, policy) == next(choose(model, items, [None]))


def test_the_choices_are_ours_whole_and_balanced():
    batches = choice_items(Words(), "x" * 200)
    items = [item for batch in batches for item in batch]
    assert len(items) >= 100 and all(len({len(item.prompt) for item in batch}) == 1 for batch in batches)
    assert all(len({tuple(option) for option in item.options}) == 4 for item in items)
    assert len({tuple(item.prompt) for item in items}) == len(items)
    answers = [item.answer for item in items]
    assert all(answers.count(place) == len(items) // 4 for place in range(4))


class Merging(Words):
    """Writes "10" as one token, and a text's first letter in another way: answers must be cut out of the whole."""

    def encode(self, text):
        return [{"*": 98, "^": 99}.get(c, ord(c) % 50) for c in ("^" + text).replace("10", "*")]


def test_items_are_of_equal_length_whatever_the_tokenizer_merges():
    prompts, answers = counting_items(Merging(), "x" * 200, n_items=60)
    assert prompts.shape[0] == answers.shape[0] == 60 and not (answers == 99).any()
    for batch in choice_items(Merging(), "x" * 200):
        assert all(99 not in option for item in batch for option in item.options)
    with pytest.raises(KvminiError, match="equal length"):
        counting_items(type("Odd", (), {"encode": lambda self, text: list(range(sum(map(ord, text)) % 977))})(), "x")
