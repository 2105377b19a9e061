"""The law-book: what a KV-cache quantizer, a quantized cache and a RoPE must hold, for anybody's implementation.

    python -m kvmini laws --quantizer my_module:factory

judges yours, in any folder from which `my_module` can be imported. It needs hypothesis, and pytest only for the
door in `door.py`. The laws are in grids, blocks, consumers, packers, ropes, caches and machine.
"""

from kvmini.laws import blocks, caches, consumers, grids, machine, packers, ropes  # noqa: F401 - enter their laws
from kvmini.laws.law import LAWS, PROFILES, Broken, Law, Verdict, judge
from kvmini.laws.report import OURS, offer
from kvmini.laws.tensors import kv_tensors

__all__ = ["LAWS", "OURS", "PROFILES", "Broken", "Law", "Verdict", "judge", "kv_tensors", "offer"]
