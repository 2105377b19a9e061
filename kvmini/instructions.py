"""Harmless instructions whose answers have a form that a program can check.

Accuracy is not all: a quantized cache can leave the perplexity alone and still change how a model behaves. Those
instructions are selected whose form the exact model keeps; the share of them that a quantized cache breaks is the
conditional flip rate. Templates were chosen by what the exact default model keeps, greedily, within 32 new tokens.

Next file: `shapes.py`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvmini.tokenizer import Tokenizer

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # what SmolLM2-Instruct is used to
ROWS = 64  # of a batch, at most
NOUNS = ("dog", "cat", "horse", "bird", "river", "mountain", "garden", "city", "book", "house", "teacher", "doctor",
         "farmer", "king", "ship", "bridge", "forest", "robot", "dragon", "pirate")  # one token each
SOME = r"(?:\S+ ){3}\S"  # four words on one line
ASKS = r'(?:\S+ ){2,}\S+\?"?$'  # one line, at least three words
PYTHON = r"(?:```python\n)?"
TEMPLATES = (  # kind, instruction, what its answer must begin with (a regular expression)
    ("starts", 'Describe a {noun}. Start your answer with "In short,".', rf"In short, {SOME}"),
    ("starts", 'Describe a {noun}. Start your answer with "In my opinion,".', rf"In my opinion, {SOME}"),
    ("starts", 'Write a story about a {noun}. Begin with "Once upon a time".', rf"Once upon a time,? {SOME}"),
    ("starts", "Complete this sentence and write it in full: The old {noun} was", rf"The old {{noun}} was {SOME}"),
    ("letter", 'Write a short letter to my {noun}. Begin with "Dear {noun}".', rf"(?i:Dear {{noun}}),\s+{SOME}"),
    ("letter", 'Write an email to the {noun}. Begin with a line "Subject:".', r"Subject: [^\n]+\n+\w"),
    ("contains", 'Write one sentence about a {noun} that contains the word "green".', rf"(?=.*\bgreen\b){SOME}"),
    ("contains", "Write one sentence with the words {noun} and winter.", rf"(?=.*\b{{noun}}\b)(?=.*\bwinter\b){SOME}"),
    ("contains", "Write a short sentence that contains the word {noun} and the word music.",
     rf"(?=.*\b{{noun}}\b)(?=.*\bmusic\b){SOME}"),
    ("code", "Write a Python function named {noun}_count that counts the words in a list.",
     PYTHON + r"def {noun}_count\([^\n]*\)[^\n]*:\n +\S"),
    ("code", "Write a Python class named {Noun} with a name.", PYTHON + r"class {Noun}\b[^\n]*:\n +\S"),
    ("code", "Write a JavaScript function named {noun}Name that returns a string.",
     r"(?:```(?:javascript|js)?\n)?function {noun}Name\([^\n]*\) *\{\s+\S"),
    ("sql", "Write an SQL query that selects all rows from the table {noun}.",
     r"(?:```(?:sql)?\n)?SELECT\s[^;]+\sFROM {noun}\b"),
    ("json", "Write a JSON object with the keys name and age for a {noun}.",
     r'(?:```(?:json)?\n)?\{\s*"name": *"[^"\n]+",\s*"age": *\d'),
    ("html", "Write an HTML heading with the text {noun}.", r"(?i)(?:```(?:html)?\n)?<h1>{noun}</h1>"),
    ("repeat", "Repeat this sentence: The {noun} is new and blue.", r'"?The {noun} is new and blue\.?"?$'),
    ("repeat", "Repeat this sentence: The {noun} is in the big garden.", r'"?The {noun} is in the big garden\.?"?$'),
    ("question", "Write one question about a {noun}.", ASKS),
    ("question", "Ask me a question about my {noun}.", ASKS),
    ("question", "Write a question that a child could ask about a {noun}.", ASKS),
    ("list", "Give a numbered list of three things about a {noun}.",
     r"1\. ([^\n]{3,})\n2\. (?!\1(?:\n|$))\w[^\n]{3}"),  # two of three: more do not fit
    ("yes or no", "Answer yes or no and explain in one sentence. Can a {noun} be green?", rf"(?:Yes|No)[.,] {SOME}"),
)


@dataclass(frozen=True)
class Instruction:
    """An instruction, the kind of form that it asks for, and whether an answer has that form."""

    text: str
    kind: str
    keeps: Callable[[str], bool] = field(compare=False, repr=False)


def instructions() -> list[Instruction]:
    """All templates with all nouns, in a fixed order.

    Example:
        >>> first = instructions()[0]
        >>> first.kind, first.text
        ('starts', 'Describe a dog. Start your answer with "In short,".')
        >>> first.keeps("In short, it is a friend with four legs."), first.keeps("A dog is a friend.")
        (True, False)
    """
    return [Instruction(_fill(text, noun), kind, _check(_fill(text, noun), _fill(form, noun)))
            for kind, text, form in TEMPLATES for noun in NOUNS]


def _fill(template: str, noun: str) -> str:
    return template.replace("{noun}", noun).replace("{Noun}", noun.title())


def _check(text: str, form: str) -> Callable[[str], bool]:
    pattern = re.compile(form, re.DOTALL)
    return lambda answer: varied(answer) and text not in answer and pattern.match(answer.strip()) is not None


def varied(answer: str) -> bool:
    """Whether more than half of an answer's words are different, and none comes three times in a row.

    So whatever is said twice, or more often, and nothing else, is no answer.

    Example:
        >>> varied("a dog and a cat"), varied("a dog A DOG"), varied("it is the the the best of all days"), varied("")
        (True, False, False, False)
    """
    words = re.findall(r"\w+", answer.lower())
    thrice = any(a == b == c for a, b, c in zip(words, words[1:], words[2:], strict=False))
    return 2 * len(set(words)) > len(words) and not thrice


def chat(text: str, tokenizer: Tokenizer | None = None) -> str:
    """The prompt that asks for `text`: ChatML with the default model's system message.

    For a tokenizer that has no such control tokens it is plain text instead: "Instruction: ...", "Answer:".

    Example:
        >>> print(chat("Say hello."))
        <|im_start|>system
        You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
        <|im_start|>user
        Say hello.<|im_end|>
        <|im_start|>assistant
        <BLANKLINE>
    """
    if tokenizer is not None and any(len(tokenizer.encode(token)) != 1 for token in ("<|im_start|>", "<|im_end|>")):
        return f"Instruction: {text}\nAnswer:"
    turns = "".join(f"<|im_start|>{who}\n{what}<|im_end|>\n" for who, what in (("system", SYSTEM), ("user", text)))
    return turns + "<|im_start|>assistant\n"


def batches(tokenizer: Tokenizer, instructions: list[Instruction]) -> list[tuple[list[int], Tensor]]:
    """Prompts of equal length together, at most 64 at a time: which instructions they are, and their ids.

    Shapes:
        each: n indices into `instructions`, ids int64 `[n, P]`; shorter prompts first.
    """
    prompts = [tokenizer.encode(chat(instruction.text, tokenizer)) for instruction in instructions]
    by_length: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(i)
    parts = [same[start:start + ROWS] for _, same in sorted(by_length.items()) for start in range(0, len(same), ROWS)]
    return [(part, torch.tensor([prompts[i] for i in part])) for part in parts]


def answer(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Text of generated ids up to the first stop token."""
    stops = (i for i, token in enumerate(ids) if token in tokenizer.stop_ids)
    return tokenizer.decode(ids[:next(stops, len(ids))])
