"""The texts that experiments run on: our own prose, and the first tokens of any. Next file: `metrics.py`."""

from importlib import resources

import torch

from kvmini.errors import KvminiError
from kvmini.model import Llama
from kvmini.tokenizer import Tokenizer

TEXTS = ("calibration", "search", "report")  # what each may be used for; figures come from "report" alone


def prose(name: str) -> str:
    """The project's own English prose, written for it and in no model's training data.

    Example:
        >>> len(prose("report").split()) > 4000
        True
    """
    return (resources.files("kvmini") / "data" / f"{name}.txt").read_text(encoding="utf-8")


def text_ids(tokenizer: Tokenizer, text: str, tokens: int, model: Llama) -> torch.Tensor:
    """The first `tokens` tokens of a text, `[1, tokens]`.

    Raises:
        KvminiError if the text, or the model's context, is shorter.
    """
    if tokens > model.config.context_length:
        raise KvminiError(f"{tokens} tokens are past the model's context of {model.config.context_length}")
    ids = tokenizer.encode(text)
    if len(ids) < tokens:
        raise KvminiError(f"the text has only {len(ids)} tokens of the {tokens} asked for: give a longer text or fewer")
    return torch.tensor([ids[:tokens]])
