"""The sizes of models that bytes follow from: the models the article names, and any config. Next file: `memory.py`."""

import json
from dataclasses import dataclass
from pathlib import Path

from kvmini.errors import KvminiError, count_of
from kvmini.model import Config


@dataclass(frozen=True)
class Shape:
    """The sizes that bytes follow from; `n_read` of the parameters are read in every decode step (default: all).

    Example:
        >>> SHAPES["LLaMA-7B"].n_parameters, SHAPES["LLaMA-7B"].token_nbytes(bits=16)
        (6738415616, 524288)
    """

    name: str
    n_layers: int
    n_kv_heads: int
    head_dim: int
    n_parameters: int
    n_read: int | None = None
    hidden: int = 0  # numbers of a layer's input, which rematerialisation keeps

    def token_nbytes(self, bits: float = 16) -> int:
        """Bytes of one token's keys and values, all `bits` wide."""
        return int(-(-2 * self.n_layers * self.n_kv_heads * self.head_dim * bits // 8))

    def weight_nbytes(self, bits: float = 16, read: bool = False) -> int:
        """Bytes of all weights, or of those that every decode step reads; 4 bits are bare ones, without scales."""
        return int(-(-(self.n_read if read and self.n_read else self.n_parameters) * bits // 8))


def decoder(name: str, n_layers: int, hidden: int, n_heads: int, n_kv_heads: int, ffn: int, vocab: int, *,
            head_dim: int | None = None, tied: bool = False, gated: bool = True, experts: int = 1, active: int = 1,
            biases: tuple[str, ...] | str = (), norms: int = 2, norm_parts: int = 1, final_norm: bool = True,
            positions: int = 0, embedding: int | None = None) -> Shape:
    """A decoder's shape by its sizes. `biases` names projections that have one: q, k, v, o and f, the feed-forward.

    A norm has `norm_parts` vectors. A decode step reads no embedding that is not the head too, and `active` experts.
    """
    head_dim, embedding, inner = head_dim or hidden // n_heads, embedding or hidden, 2 if gated else 1
    q, kv, norm = n_heads * head_dim, n_kv_heads * head_dim, norm_parts * hidden
    bias = {"q": q, "k": kv, "v": kv, "o": hidden}
    attention = 2 * hidden * (q + kv) + sum(bias[side] for side in biases if side != "f")
    expert = (inner + 1) * hidden * ffn + ("f" in biases) * (inner * ffn + hidden)
    table, router = vocab * embedding, (experts > 1) * experts * hidden
    n_parameters = (n_layers * (attention + experts * expert + router + norms * norm) + final_norm * norm
                    + (1 if tied else 2) * table + (embedding != hidden) * 2 * hidden * embedding + positions * hidden)
    idle = n_layers * (experts - active) * expert + (not tied) * table + positions * hidden
    return Shape(name, n_layers, n_kv_heads, head_dim, n_parameters, n_parameters - idle, hidden)


CLASSIC = {"tied": True, "gated": False, "norm_parts": 2}
SHAPES = {shape.name: shape for shape in (
    *(decoder(name, 32, 4096, 32, 32, 11008, 32000) for name in ("LLaMA-7B", "Llama-2-7B")),
    decoder("Llama-2-13B", 40, 5120, 40, 40, 13824, 32000),
    decoder("OPT-175B", 96, 12288, 96, 96, 49152, 50272, biases="qkvof", positions=2050, **CLASSIC),
    decoder("Mistral-7B", 32, 4096, 32, 8, 14336, 32000),
    decoder("Mixtral-8x7B", 32, 4096, 32, 8, 14336, 32000, experts=8, active=2),
    decoder("Falcon-7B", 32, 4544, 71, 1, 18176, 65024, norms=1, **CLASSIC),
    decoder("SmolLM2-135M", 30, 576, 9, 3, 1536, 49152, tied=True))}


def shape_of_model(config: Config, name: str = "the model") -> Shape:
    """The shape of a loaded model."""
    return decoder(name, config.n_layers, config.hidden_size, config.n_heads, config.n_kv_heads, config.ffn_size,
                   config.vocab_size, head_dim=config.head_dim, tied=config.tied, biases=config.biases)


def shape_of_config(path: Path | str) -> Shape:
    """The shape that a Hugging Face config.json (or its folder) describes: llama, mistral, qwen2, mixtral or opt.

    Raises:
        KvminiError for another family, a size that is missing or no whole number, and no JSON.
    """
    path = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise KvminiError(f"cannot read config {path}: {getattr(error, 'strerror', None) or error}") from None
    family = config.get("model_type") if isinstance(config, dict) else None
    if family not in ("llama", "mistral", "qwen2", "mixtral", "opt"):
        raise KvminiError(f"{path}: 'model_type' must be llama, mistral, qwen2, mixtral or opt, not {family!r}")

    def size(key: str, default: int | None = None) -> int:
        value = default if config.get(key) is None else config[key]
        if value is None:
            raise KvminiError(f"{path} has no {key!r}, which a config of the {family} family needs")
        return count_of(value, f"{key!r} of {path}")

    n_heads, hidden = size("num_attention_heads"), size("hidden_size")
    n_kv_heads = n_heads if family == "opt" else size("num_key_value_heads", n_heads if family == "llama" else None)
    if (not config.get("head_dim") and hidden % n_heads) or n_heads % n_kv_heads:
        raise KvminiError(f"{path}: {n_heads} heads cannot share {hidden} channels, or {n_kv_heads} kv heads, evenly")
    more = {"tied": config.get("tie_word_embeddings", family == "opt")}
    if family == "opt":
        biases = "qkvof" if config.get("enable_bias", True) else ""
        more = {**CLASSIC, **more, "norm_parts": 2 * bool(config.get("layer_norm_elementwise_affine", True)),
                "positions": size("max_position_embeddings") + 2, "embedding": size("word_embed_proj_dim", hidden),
                "final_norm": bool(config.get("do_layer_norm_before", True))}
    else:
        biases = "qkv" if family == "qwen2" else "qkvo" * (family == "llama" and bool(config.get("attention_bias")))
        biases += "f" * (family == "llama" and bool(config.get("mlp_bias")))
        more["head_dim"] = size("head_dim", hidden // n_heads)
    if family == "mixtral":
        more |= {"experts": size("num_local_experts"), "active": size("num_experts_per_tok")}
    return decoder(str(config.get("_name_or_path") or path.resolve().parent.name), size("num_hidden_layers"), hidden,
                   n_heads, n_kv_heads, size("ffn_dim" if family == "opt" else "intermediate_size"),
                   size("vocab_size"), biases=biases, **more)
