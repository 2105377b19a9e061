"""kvmini: KV-cache quantization, small enough to read in an evening.

Reading order: errors, axes, packing, rounding, quantizers/base, quantizers/uniform, rope, attention, store, cache,
policies, model, tokenizer, weights, metrics, evaluate, experiments, tables, plots, files; then the law-book, laws/law,
laws/tensors, laws/cases, laws/offers, laws/grids, laws/memory, laws/blocks, laws/consumers, laws/packers, laws/ropes,
laws/caches, laws/machine, laws/public, laws/report, laws/door; and __main__. A file imports only what comes before it.
"""

import os

# Before torch is loaded. Its threads wait for each other actively, for milliseconds: on a machine of few cores
# one other busy process then makes every small operation 20 times slower. Waiting more briefly avoids that.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from kvmini import policies
from kvmini.cache import CachePolicy, KVCache, QuantizedKVCache
from kvmini.errors import KvminiError
from kvmini.model import Config, Llama, generate
from kvmini.quantizers.base import Quantizer, Stored
from kvmini.quantizers.uniform import UniformQuantizer
from kvmini.rope import Rope
from kvmini.store import Side
from kvmini.tokenizer import Tokenizer
from kvmini.weights import load_model

__all__ = ["CachePolicy", "Config", "KVCache", "KvminiError", "Llama", "QuantizedKVCache", "Quantizer", "Rope", "Side",
           "Stored", "Tokenizer", "UniformQuantizer", "generate", "load_model", "policies"]
