"""What the tests share: hypothesis profiles and the default model, loaded once."""

import os

import pytest
import torch
from hypothesis import settings

from kvmini import load_model

settings.register_profile("dev", deadline=None, max_examples=50)
settings.register_profile("ci", deadline=None, max_examples=100, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(scope="session")
def loaded():
    """The default model and its tokenizer, in float64."""
    return load_model(dtype=torch.float64)


@pytest.fixture(scope="session")
def loaded32():
    """The default model and its tokenizer, in float32 as it is used."""
    return load_model()
