"""A Llama-style decoder, written out step by step.

Token ids -> embedding -> L times (attention, SwiGLU), each added to the residual stream -> norm -> head.
Keys and values go through the cache and through nothing else, so the cache decides what attention sees;
the scores, the softmax and the weighted sum are in `attention.py`.

No training loop, no dropout, no padding: batches hold sequences of equal length. Next: `tokenizer.py`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvmini.cache import CachePolicy, KVCache, all_or_nothing
from kvmini.errors import KvminiError, count_of
from kvmini.remat import RematPolicy
from kvmini.rope import Rope


@dataclass(frozen=True)
class Config:
    """Sizes of a model; all of them come from its checkpoint.

    Raises:
        KvminiError for a size below 1, or where query heads do not share the key/value heads evenly.
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_size: int
    ffn_size: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope: Rope
    tied: bool = True  # the head is the embedding
    biases: tuple[str, ...] = ()  # of q, k, v, o: the projections that have one

    def __post_init__(self):
        for name in ("n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_size", "ffn_size", "vocab_size"):
            count_of(getattr(self, name), name)
        if self.n_heads % self.n_kv_heads:
            raise KvminiError(f"{self.n_heads} query heads cannot share {self.n_kv_heads} key/value heads evenly")


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in float32 at least (1000^2 does not fit float16)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Project to queries, keys and values; attend through the cache; project back."""

    def __init__(self, config: Config, layer: int):
        super().__init__()
        self.config, self.layer = config, layer
        hidden, q_size, kv_size = (config.hidden_size, config.n_heads * config.head_dim,
                                   config.n_kv_heads * config.head_dim)
        self.q = nn.Linear(hidden, q_size, bias="q" in config.biases)
        self.k = nn.Linear(hidden, kv_size, bias="k" in config.biases)
        self.v = nn.Linear(hidden, kv_size, bias="v" in config.biases)
        self.o = nn.Linear(q_size, hidden, bias="o" in config.biases)

    def forward(self, x: Tensor, cache: KVCache) -> Tensor:
        B, S, _ = x.shape
        D = self.config.head_dim
        q = self.q(x).view(B, S, -1, D).transpose(1, 2)  # [B, H, S, D]
        k = self.k(x).view(B, S, -1, D).transpose(1, 2)  # [B, Hkv, S, D]
        v = self.v(x).view(B, S, -1, D).transpose(1, 2)  # [B, Hkv, S, D]
        out = cache.attend(self.layer, q, k, v, layer_input=x)  # [B, H, S, D]
        return self.o(out.transpose(1, 2).reshape(B, S, -1))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Config):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.down = nn.Linear(config.ffn_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + SwiGLU(norm(x))."""

    def __init__(self, config: Config, layer: int):
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config, layer)
        self.ffn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.ffn = SwiGLU(config)

    def forward(self, x: Tensor, cache: KVCache) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cache)
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    """The decoder.

    Shapes:
        ids int64 `[B, S]` -> logits `[B, S, vocab]`, or `[B, 1, vocab]` with last_only. The cache advances.
    Raises:
        KvminiError for ids that are no token, an empty call, or positions past the model's context.
    Example:
        >>> config = Config(n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, hidden_size=32, ffn_size=64,
        ...                 vocab_size=100, context_length=64, norm_eps=1e-5, rope=Rope(8))
        >>> model = Llama(config)
        >>> cache = model.new_cache()
        >>> model(torch.tensor([[1, 2, 3]]), cache).shape, cache.length
        (torch.Size([1, 3, 100]), 3)
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = None if config.tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def new_cache(self, policy: CachePolicy | RematPolicy | None = None) -> KVCache:
        """An empty cache for this model: exact, or as the policy says."""
        return KVCache(self.config.n_layers, self.config.rope) if policy is None else policy.new_cache(self)

    def forward(self, ids: Tensor, cache: KVCache | None = None, last_only: bool = False) -> Tensor:
        cache = self.new_cache() if cache is None else cache
        self._check(ids, cache.length)
        x = self.embedding(ids)  # [B, S, hidden]
        with all_or_nothing(cache.stores()):  # an interrupted call must not leave some layers ahead of others
            for layer in self.layers:
                x = layer(x, cache)
        x = self.norm(x[:, -1:] if last_only else x)
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)

    def _check(self, ids: Tensor, first: int) -> None:
        vocab, context = self.config.vocab_size, self.config.context_length
        if ids.ndim != 2 or ids.dtype != torch.long or ids.numel() == 0:
            raise KvminiError(f"ids must be int64 [B, S] with at least one token, not {ids.dtype} {list(ids.shape)}")
        if ids.min() < 0 or ids.max() >= vocab:
            raise KvminiError(f"ids must be 0 .. {vocab - 1}, not {int(ids.min())} .. {int(ids.max())}")
        if first + ids.shape[1] > context:
            raise KvminiError(f"{first + ids.shape[1]} tokens are past the model's context of {context}")


@torch.no_grad()
def generate(model: Llama, ids: Tensor, cache: KVCache, max_new_tokens: int = 64, temperature: float = 0.0,
             seed: int = 0, stop: Iterable[int] = (), on_token: Callable[[Tensor], None] | None = None) -> Tensor:
    """Continue `ids`: greedy at temperature 0, else sampled from the softmax of logits / temperature.

    Shapes:
        ids `[B, S]`, the tokens that the cache has not seen yet -> the new tokens `[B, N]`, N <= max_new_tokens.
        A row that met a `stop` token repeats it until all rows have; `on_token` gets each step's tokens `[B]`.
        The last new token has not been through the cache.
    Example:
        >>> model = Llama(Config(1, 2, 1, 8, 16, 32, 50, 64, 1e-5, Rope(8)))
        >>> generate(model, torch.tensor([[1, 2]]), model.new_cache(), max_new_tokens=5).shape
        torch.Size([1, 5])
    """
    count_of(max_new_tokens, "max_new_tokens")
    if not 0 <= temperature < float("inf"):
        raise KvminiError(f"temperature must be at least 0 (0 is greedy), not {temperature}")
    random = torch.Generator(device=ids.device).manual_seed(seed)
    stop = torch.tensor(sorted(stop), dtype=torch.long, device=ids.device)
    new: list[Tensor] = []
    while len(new) < max_new_tokens:
        logits = model(ids, cache, last_only=True)[:, -1]  # [B, vocab]
        if temperature == 0:
            token = logits.argmax(-1)
        else:
            logits = logits.double() - logits.max(-1, keepdim=True).values  # so that no temperature overflows
            token = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=random)[:, 0]
        if new:
            token = torch.where(torch.isin(new[-1], stop), new[-1], token)
        new.append(token)
        if on_token is not None:
            on_token(token)
        if torch.isin(token, stop).all():
            break
        ids = token[:, None]
    return torch.stack(new, dim=1)
