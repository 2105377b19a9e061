"""The law-book, on kvmini's own or on what the options name."""

from kvmini.laws.door import test_law  # noqa: F401
