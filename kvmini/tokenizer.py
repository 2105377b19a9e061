"""Text to token ids and back, with the vocabulary that the checkpoint carries.

The `tokenizers` library does the work; this file only tells it what a GGUF file says: byte-level BPE
("gpt2": merges are in the file) or SentencePiece BPE ("llama": merges follow from the scores; of two
pieces with equal scores the earlier one wins here, the leftmost in SentencePiece). No begin token is
added. Control tokens written out in a text (`<|im_start|>`) count as that token. Next: `weights.py`.
"""

from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Engine

from kvmini.errors import KvminiError

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # GGUF's token types
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
PRE_TOKENIZERS = {  # how the text is cut before merging, by `tokenizer.ggml.pre`
    "gpt-2": lambda: [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": lambda: [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": lambda: [pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
                          pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)],
}


class Tokenizer:
    """The tokenizer described by a GGUF file's metadata.

    Raises:
        KvminiError for a kind of tokenizer that is not known here.
    Example:
        >>> metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "ab"],
        ...             "tokenizer.ggml.merges": ["a b"]}
        >>> tokenizer = Tokenizer(metadata)
        >>> tokenizer.encode("abba"), tokenizer.decode([2, 1, 0])
        ([2, 1, 0], 'abba')
    """

    def __init__(self, metadata: dict[str, Any]):
        kind = metadata.get("tokenizer.ggml.model")
        if kind not in ("gpt2", "llama"):
            raise KvminiError(f"tokenizer.ggml.model is {kind!r}: only 'gpt2' (byte-level BPE) and 'llama' "
                              "(SentencePiece BPE) are known")
        try:
            self._engine = _byte_level(metadata) if kind == "gpt2" else _sentencepiece(metadata)
        except KvminiError:
            raise
        except KeyError as key:
            raise KvminiError(f"the GGUF file has no metadata key {key}") from None
        except Exception as error:  # the library's own errors have no narrower type
            reason = " ".join(str(error).split())[:200]
            raise KvminiError(f"the file's vocabulary and merges do not fit together: {reason}") from None
        tokens = metadata["tokenizer.ggml.tokens"]
        types = metadata.get("tokenizer.ggml.token_type", [])
        self._engine.add_special_tokens([AddedToken(token, normalized=False, special=True)
                                         for token, type_ in zip(tokens, types, strict=False) if type_ == CONTROL])
        self._engine.add_tokens([AddedToken(token, normalized=False)
                                 for token, type_ in zip(tokens, types, strict=False) if type_ == USER_DEFINED])
        ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
        self.stop_ids: tuple[int, ...] = tuple(sorted({int(i) for i in ends if i is not None}))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self._engine.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int], after: list[int] | None = None) -> str:
        """Text of token ids, control tokens written out; with `after`, what they add to the text of those."""
        if after:
            before = self.decode(after).rstrip("\ufffd")  # a character cut in two is whole once ids follow
            return self.decode([*after, *ids])[len(before):]
        return self._engine.decode(ids, skip_special_tokens=False)


def _byte_level(metadata: dict[str, Any]) -> Engine:
    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    pre = "gpt-2" if pre == "default" else pre
    if pre not in PRE_TOKENIZERS:
        raise KvminiError(f"tokenizer.ggml.pre is {pre!r}: only {', '.join(PRE_TOKENIZERS)} are known")
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    engine = Engine(models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    engine.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[pre]())
    engine.decoder = decoders.ByteLevel()
    return engine


def _sentencepiece(metadata: dict[str, Any]) -> Engine:
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    vocab = {token: i for i, token in enumerate(tokens)}
    # SentencePiece merges the pair whose union scores best; as a list of merges: every split, best union first.
    splits = [(score, token[:i], token[i:]) for token, score in zip(tokens, scores, strict=True)
              for i in range(1, len(token)) if token[:i] in vocab and token[i:] in vocab]
    splits.sort(key=lambda split: (-split[0], vocab[split[1]], vocab[split[2]]))
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    engine = Engine(models.BPE(vocab, [(left, right) for _, left, right in splits], unk_token=unknown,
                               fuse_unk=True, byte_fallback=True))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    engine.normalizer = normalizers.Sequence([*([normalizers.Prepend("▁")] if prefix else []),
                                              normalizers.Replace(" ", "▁")])
    engine.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                        *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return engine
