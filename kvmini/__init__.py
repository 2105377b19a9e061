"""kvmini: KV-cache quantization, small enough to read in an evening.

Reading order: errors, axes, packing, rounding, growing, quantizers/base, quantizers/uniform, rope, attention, side,
kernels/source, store, kernels/twin, kernels/compiled, kernels/decode, cache, remat, model, tokenizer, weights,
texts, metrics, phenomena, quantizers/exact, quantizers/transformed, quantizers/rotated, quantizers/nonuniform,
quantizers/sparse, quantizers/normalized, quantizers/hybrid, quantizers/least_squares, quantizers/basis,
quantizers/float8, calibration, spellings, policies, evaluate, instructions, shapes, memory, experiments/run,
experiments/ablation, experiments/memory, experiments/groups, experiments/heads, experiments/sinks,
experiments/massive, experiments/key_order, experiments/windows, experiments/blind, experiments/flips,
experiments/layers, experiments/frontier, experiments/reach, experiments/calibrated, experiments/sweep,
experiments/principle, tables, plots/style, plots/ablation, plots/phenomena, plots/behaviour, plots/memory,
plots/frontier, catalogue, claims, files, prepare, commands; then the law-book, laws/law, laws/tensors, laws/cases,
laws/offers, laws/grids, laws/memory, laws/blocks, laws/consumers, laws/packers, laws/ropes, laws/caches,
laws/machine, laws/public, laws/report, laws/door; and __main__. A file imports only what comes before it.
"""

import os

# Before torch is loaded. Its threads wait for each other actively, for milliseconds: on a machine of few cores
# one other busy process then makes every small operation 20 times slower. Waiting more briefly avoids that.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from kvmini import policies
from kvmini.cache import CachePolicy, KVCache, QuantizedKVCache
from kvmini.calibration import Calibration, calibrate
from kvmini.errors import KvminiError
from kvmini.model import Config, Llama, generate
from kvmini.quantizers.base import Quantizer, Stored
from kvmini.quantizers.uniform import UniformQuantizer
from kvmini.remat import RematPolicy
from kvmini.rope import Rope
from kvmini.side import Side
from kvmini.tokenizer import Tokenizer
from kvmini.weights import load_model

__all__ = ["CachePolicy", "Calibration", "Config", "KVCache", "KvminiError", "Llama", "QuantizedKVCache", "Quantizer",
           "RematPolicy", "Rope", "Side", "Stored", "Tokenizer", "UniformQuantizer", "calibrate", "generate",
           "load_model", "policies"]
