"""Instructions with a checkable form: what each kind accepts and refuses, prompts, batches, and the default model."""

from collections import Counter

import pytest
import torch
from gguf_files import END, byte_level
from hypothesis import example, given
from hypothesis import strategies as st

from kvmini import Tokenizer, generate
from kvmini.instructions import NOUNS, ROWS, SYSTEM, TEMPLATES, answer, batches, chat, instructions

ALL = instructions()
OF_DOG = ALL[::len(NOUNS)]  # the first noun, once for each template
ANSWERS = {  # a part of the instruction's text: right answers, wrong ones
    'with "In short,"': (["In short, a dog is a loyal friend."],
                         ["A dog is, in short, a loyal friend.", "In short, a dog.", "In short,"]),
    'with "In my opinion,"': (["In my opinion, a dog is a loyal friend."],
                              ["In my view, a dog is a loyal friend.", "In my opinion, in my opinion, in my opinion,"]),
    "Once upon": (["Once upon a time, there was a dog named Max.", "Once upon a time there lived a dog"],
                  ["There was once a dog named Max.", "Once upon a dog there was a time"]),
    "The old dog was": (["The old dog was a loyal and kind one."],
                        ["The old cat was a loyal and kind one.", "The old dog was", "was the old dog a loyal one?"]),
    "short letter": (["Dear dog,\n\nI am writing to you today", "Dear Dog,\nhow are you this morning?"],
                     ["Dear cat,\n\nI am writing to you today", "Dear dog", "My dear dog,\nI am writing to you"]),
    "an email": (["Subject: A walk in the park\n\nDear dog,"],
                 ["Dear dog,\n\nSubject: a walk", "Subject:", "Subject: A walk in the park"]),
    '"green"': (["The dog sleeps on green grass."],
                ["The dog sleeps on grass.", "green", "The dog lives on a greenish hill."]),
    "words dog and winter": (["A dog runs all winter.", "In winter the dog sleeps."],
                             ["A dog runs all summer.", "The dogs sleep all winter.", "dog winter"]),
    "the word music": (["My dog hears the music.", "The music wakes up a dog."],
                       ["My dog hears the musician.", "The music wakes up a cat.", "dog music"]),
    "dog_count": (["def dog_count(words):\n    return len(words)",
                   "```python\ndef dog_count(x: list) -> int:\n  return 3"],
                  ["def count(words):\n    return len(words)", "def dog_count(words):",
                   "dog_count(words)\n    return 1", "def dog_count(words):\nreturn len(words)"]),
    "class named Dog": (["```python\nclass Dog:\n    def __init__(self, name):", "class Dog(A):\n    name = 'Max'"],
                        ["class Cat:\n    def __init__(self, name):", "class Dog:", "class dog:\n    name = 'Max'"]),
    "JavaScript": (['```javascript\nfunction dogName() {\n  return "Max";', "function dogName(a) {\n  return a;\n}"],
                   ["function name() {\n  return 1;", "def dogName(a):\n  return a", "function dogName"]),
    "SQL": (["```sql\nSELECT * FROM dog;\n```", "SELECT name, age\nFROM dog WHERE age > 1"],
            ["SELECT * FROM cat;", "FROM dog SELECT *", "SELECT *; FROM dog", "SELECT * FROM dogs;"]),
    "JSON": (['{"name": "Max", "age": 3}', '```json\n{\n  "name": "Max",\n  "age": 3,\n  "size"'],
             ['{"name": "Max"}', "name: Max, age: 3", '{"name": "", "age": 3}', '{"name": "Max", "age": "old"}']),
    "HTML": (["<h1>dog</h1>", "```html\n<h1>Dog</h1>\n```"], ["<h1>cat</h1>", "<h2>dog</h2>", "<h1>dog", "dog"]),
    "new and blue": (["The dog is new and blue.", '"The dog is new and blue"'],
                     ["The dog is blue and new.", "The dog is new and blue. It barks.", "The dog is a new and blue."]),
    "big garden": (["The dog is in the big garden."],
                   ["The dog is in the garden.", "The cat is in the big garden.", "So the dog is in the big garden."]),
    "Write one question": (["What is a dog?", 'One may ask, "What is a dog?"'],
                           ["A dog is an animal.", "What is a dog? It barks.", "Dog?", "?"]),
    "Ask me": (["What's your dog's name?"], ["My dog's name is Max.", "Sure? I am glad to help.", "???"]),
    "a child could": (["Why does a dog bark?"], ["A dog barks.", "Why? Because a dog barks."]),
    "numbered list": (["1. It barks.\n2. It runs.\n3. It", "1. Friendly\n2. Loyal"],
                      ["It barks, it runs.", "1. It barks.", "1. It barks.\n2. It barks.", "1. Dog\n2. Dog\n3. Dog",
                       "- It barks.\n- It runs.", "2. It barks.\n1. It runs."]),
    "yes or no": (["No. A dog is never green.", "Yes, it can be painted so."],
                  ["No.", "Yes", "A dog, no. It is never green.", "Nobody knows if it can be.", "Yes, yes, yes, yes"]),
}
DEGENERATE = ("", " \n\t", ".", "?", "1.", "the", "green", "the the the the", "1. 1. 1. 1.", "1.\n2.\n3.", "A: A: A:",
              "def def def def", "? ? ? ?", "``````", "{}", "of rows of rows of rows of rows of rows of rows")


FORMS = {instruction.text: form for instruction, (_, _, form) in zip(OF_DOG, TEMPLATES, strict=True)}


def of(part):
    found = [instruction for instruction in OF_DOG if part in instruction.text]
    assert len(found) == 1
    return found[0]


# Forms


def test_every_template_has_answers_here():
    assert {of(part).text for part in ANSWERS} == {instruction.text for instruction in OF_DOG}


@pytest.mark.parametrize("part, right", [(part, text) for part, (right, _) in ANSWERS.items() for text in right])
def test_a_right_answer_is_accepted(part, right):
    assert of(part).keeps(right)
    assert of(part).keeps(f"\n {right} \n")


@pytest.mark.parametrize("part, wrong", [(part, text) for part, (_, wrong) in ANSWERS.items() for text in wrong])
def test_a_wrong_answer_is_refused(part, wrong):
    assert not of(part).keeps(wrong)


@pytest.mark.parametrize("part, right", [(part, right[0]) for part, (right, _) in ANSWERS.items()])
def test_a_right_answer_said_over_and_over_is_refused(part, right):
    assert not any(instruction.keeps(joint.join([right] * 3)) for instruction in ALL for joint in ("\n", " ", ""))


@pytest.mark.parametrize("part", [part for part in ANSWERS if "{noun}" in FORMS[of(part).text].lower()])
def test_where_the_form_names_the_noun_another_noun_is_refused(part):
    right, cat = ANSWERS[part][0][0], ALL[ALL.index(of(part)) + NOUNS.index("cat")]
    assert not cat.keeps(right)
    assert cat.keeps(right.replace("dog", "cat").replace("Dog", "Cat"))


@pytest.mark.parametrize("text", DEGENERATE)
def test_empty_and_degenerate_answers_are_refused_by_all(text):
    assert not [instruction.text for instruction in ALL if instruction.keeps(text)]


@given(st.text(min_size=1) | st.sampled_from([word for i in OF_DOG for word in i.text.split()]), st.integers(2, 40))
@example("Yes,", 2)
@example("def dog_count(x):\n    return", 2)
@example("The dog is new and blue.", 2)
def test_one_word_again_and_again_is_refused_by_all(word, n):
    assert not [instruction.text for instruction in ALL if instruction.keeps((word + " ") * n)]


@pytest.mark.parametrize("text", ["It is what it was, and nobody here knows more.",
                                  "I'm sorry, but I can't help with that.",
                                  "Hello! How can I help you today? I am here for you."])
def test_an_answer_to_something_else_is_refused_by_all(text):
    assert not [instruction.text for instruction in ALL if instruction.keeps(text)]


def test_an_instruction_repeated_is_no_answer():
    assert not [instruction.text for instruction in ALL if instruction.keeps(instruction.text)]


# The list


def test_at_least_400_all_different_of_at_least_six_kinds():
    assert len({instruction.text for instruction in ALL}) == len(ALL) == len(TEMPLATES) * len(NOUNS) >= 400
    kinds = Counter(instruction.kind for instruction in ALL)
    assert len(kinds) >= 6 and max(kinds.values()) <= 0.4 * len(ALL)


def test_nothing_is_left_to_fill_in():
    assert not [instruction.text for instruction in ALL if "noun" in instruction.text.lower()]


def test_the_same_every_time():
    assert instructions() == ALL


# Prompts and batches


def chatml():
    return Tokenizer(byte_level(control=(END, "<|im_start|>", "<|im_end|>")))


def test_chatml_for_a_tokenizer_that_knows_it():
    assert chat("Hi.", chatml()) == chat("Hi.") == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("control", [(END,), (END, "<|im_start|>"), (END, "<|im_end|>")])
def test_plain_text_for_a_tokenizer_that_does_not(control):
    assert chat("Hi.", Tokenizer(byte_level(control=control))) == "Instruction: Hi.\nAnswer:"


def test_batches_hold_each_prompt_once_in_equal_lengths():
    tokenizer = chatml()
    parts = batches(tokenizer, ALL)
    assert sorted(i for part, _ in parts for i in part) == list(range(len(ALL)))
    for part, ids in parts:
        assert ids.dtype == torch.long and ids.shape[0] == len(part) <= ROWS
        assert ids.tolist() == [tokenizer.encode(chat(ALL[i].text)) for i in part]


def test_a_length_of_more_than_64_prompts_is_cut():
    assert [len(part) for part, _ in batches(chatml(), ALL[:1] * 150)] == [64, 64, 22]
    assert batches(chatml(), []) == []


def test_an_answer_ends_before_the_first_stop_token():
    tokenizer = chatml()
    stop = tokenizer.stop_ids[0]
    assert answer(tokenizer, [*b"yes", stop, *b"no", stop]) == "yes"
    assert answer(tokenizer, [*b"yes"]) == "yes"
    assert answer(tokenizer, [stop]) == answer(tokenizer, []) == ""


# The default model


@pytest.mark.slow
def test_few_lengths_and_control_tokens_of_the_default_model(loaded32):
    tokenizer = loaded32[1]
    ids = tokenizer.encode(chat("Hi."))
    start, end = tokenizer.encode("<|im_start|>"), tokenizer.encode("<|im_end|>")
    assert len(start) == len(end) == 1 and ids.count(start[0]) == 3 and ids.count(end[0]) == 2
    assert end[0] in tokenizer.stop_ids
    lengths = {ids.shape[1] for _, ids in batches(tokenizer, ALL)}
    assert len(lengths) <= 25 and min(lengths) >= 35 and max(lengths) <= 120


@pytest.mark.slow
def test_the_default_model_keeps_a_good_share(loaded32):
    model, tokenizer = loaded32
    part, ids = max(batches(tokenizer, ALL), key=lambda batch: len(batch[0]))
    part, ids = part[::4], ids[::4]
    new = generate(model, ids, model.new_cache(), max_new_tokens=32, stop=tokenizer.stop_ids)
    kept = [ALL[i].keeps(answer(tokenizer, row)) for i, row in zip(part, new.tolist(), strict=True)]
    assert len(kept) >= 16 and sum(kept) >= 0.6 * len(kept)
