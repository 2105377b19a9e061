"""Quantizers: how a block of numbers is stored. One interface (`base.py`), one file a method."""
