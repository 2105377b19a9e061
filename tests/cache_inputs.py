"""What the tests of caches draw from: tokens, ways to cut them into calls, policies."""

import torch
from hypothesis import strategies as st

from kvmini import CachePolicy, QuantizedKVCache, Rope, Side, UniformQuantizer

D, HKV, H, G = 16, 2, 4, 8
AXES = ("per_token", "per_channel")
PREFILLS = ("exact", "streamed", "all")


def tokens(n, batch=1, seed=0, dtype=torch.float64):
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, heads, n, D, generator=random, dtype=torch.float64) for heads in (H, HKV, HKV))
    k[..., 3] *= 20
    return q.to(dtype), k.to(dtype), v.to(dtype)


def cut(n, seed):
    """n tokens cut into calls: a list of sizes that sum to n."""
    random, sizes = torch.Generator().manual_seed(seed), []
    while sum(sizes) < n:
        sizes.append(min(n - sum(sizes), int(torch.randint(1, 12, (), generator=random))))
    return sizes


def run(cache, q, k, v, sizes):
    outputs = [cache.attend(0, *part) for part in zip(*(x.split(sizes, dim=-2) for x in (q, k, v)), strict=True)]
    return torch.cat(outputs, dim=-2)


def new_cache(policy):
    return QuantizedKVCache(1, Rope(D), policy)


@st.composite
def sides(draw):
    quantizer = UniformQuantizer(draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from(AXES)), G)
    flush = quantizer.block * draw(st.integers(1, 3)) if draw(st.booleans()) else None
    return Side(quantizer, draw(st.sampled_from([0, 1, 5, 8, 20])), flush)


def cache_policies(prefills=PREFILLS):
    return st.builds(CachePolicy, sides(), sides(), st.sampled_from([0, 1, 4]), st.booleans(),
                     st.sampled_from(prefills))


def bodies_equal(a, b):
    return all(x.body.shape == y.body.shape and all(torch.equal(x.body.parts[p], y.body.parts[p]) for p in x.body.parts)
               for x, y in zip(a.keys + a.values, b.keys + b.values, strict=True))


def comes_back(quantizer, dtype):
    """Numbers of any dtype come back in it and close by, at 8 bits; nothing comes back as nothing."""
    x = tokens(8)[1].to(dtype)
    x_hat = quantizer.dequantize(quantizer.quantize(x))
    assert x_hat.dtype == dtype and (x_hat - x).double().abs().max() < 0.6
    empty = quantizer.quantize(x[..., :0, :])
    assert quantizer.dequantize(empty).shape == (1, HKV, 0, D) and (empty.nbytes, empty.bits_per_element) == (0, 0.0)
