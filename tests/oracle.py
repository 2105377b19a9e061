"""Independent restatements in float64 numpy: they share no line with the package."""

import numpy as np


def uniform(x, n_bits, scale_dtype=np.float16):
    """The asymmetric quantizer on groups along the last axis: (codes, stored scale, stored minimum, x_hat)."""
    x = np.asarray(x, np.float64)
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    below = low.astype(scale_dtype)
    below = np.where(below > low, np.nextafter(below, scale_dtype(-np.inf)), below)
    minimum = np.where(low == high, low.astype(scale_dtype), below).astype(np.float64)
    wanted = np.where(low == high, 0, (high - minimum) / (2**n_bits - 1))
    above = wanted.astype(scale_dtype)
    scale = np.where(above < wanted, np.nextafter(above, scale_dtype(np.inf)), above).astype(np.float64)
    codes = np.where(scale > 0, np.rint((x - minimum) / np.where(scale > 0, scale, 1)), 0).clip(0, 2**n_bits - 1)
    return codes, scale[..., 0], minimum[..., 0], codes * scale + minimum


def llama_logits(weights, config, ids):
    """A Llama forward pass over a whole sequence `[S]`: no cache, no grouping of heads, complex-number RoPE."""
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    D, S = config.head_dim, len(ids)

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * w[f"{name}.weight"]

    turn = np.exp(1j * np.arange(S)[:, None] / config.rope.base ** (2 * np.arange(D // 2) / D))

    def rotate(head):
        pairs = (head[:, :D // 2] + 1j * head[:, D // 2:]) * turn
        return np.concatenate([pairs.real, pairs.imag], axis=1)

    x = w["embedding.weight"][ids]
    for layer in range(config.n_layers):
        at = f"layers.{layer}."
        h = norm(x, at + "attention_norm")
        q, k, v = (h @ w[f"{at}attention.{side}.weight"].T for side in "qkv")
        heads = []
        for head in range(config.n_heads):
            shared = head // (config.n_heads // config.n_kv_heads)
            qs, ks, vs = (t[:, i * D:(i + 1) * D] for t, i in ((q, head), (k, shared), (v, shared)))
            scores = rotate(qs) @ rotate(ks).T / np.sqrt(D)
            scores[np.triu_indices(S, 1)] = -np.inf
            probabilities = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(probabilities / probabilities.sum(-1, keepdims=True) @ vs)
        x = x + np.concatenate(heads, axis=1) @ w[at + "attention.o.weight"].T
        h = norm(x, at + "ffn_norm")
        gate = h @ w[at + "ffn.gate.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[at + "ffn.up.weight"].T)) @ w[at + "ffn.down.weight"].T
    return norm(x, "norm") @ w["embedding.weight" if config.tied else "head.weight"].T
