"""Text to token ids and back: byte-level BPE, SentencePiece against a greedy oracle, and the real one."""

import itertools

import pytest
from gguf_files import END, NORMAL, byte_level, sentencepiece
from hypothesis import example, given
from hypothesis import strategies as st

from kvmini import KvminiError, Tokenizer
from kvmini.texts import prose

SPACE = "Ġ"  # how byte-level tokens write a space
MERGES = ("t h", "th e", f"{SPACE} the", f"{SPACE} {SPACE}", "1 2", "Ã ©")


# Byte-level BPE


@given(st.text())
@example("the thé 12 \r\n\t \x00 \ufffd\U0001f600 e\u0301 | < |")
def test_any_text_comes_back(text):
    tokenizer = Tokenizer(byte_level(merges=MERGES))
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text())
def test_without_merges_that_apply_a_text_is_its_bytes(text):
    tokenizer = Tokenizer(byte_level(merges=("ÿ ÿ",), control=()))
    assert tokenizer.encode(text) == list(text.encode())


def test_merges_go_by_rank():
    tokenizer = Tokenizer(byte_level(merges=("b c", "a b", "ab c")))
    bc, ab = 256, 257
    assert tokenizer.encode("abc") == [ord("a"), bc]
    assert tokenizer.encode("abab") == [ab, ab]


def test_no_merge_across_words():
    tokenizer = Tokenizer(byte_level(merges=(f"e {SPACE}", f"{SPACE} t")))
    assert tokenizer.encode("e t") == [ord("e"), 257]


def test_no_begin_token_is_added():
    metadata = byte_level() | {"tokenizer.ggml.bos_token_id": 3, "tokenizer.ggml.add_bos_token": True}
    assert Tokenizer(metadata).encode("a") == [ord("a")]


def test_a_control_token_written_out_is_one_id():
    tokenizer = Tokenizer(byte_level(merges=("t h", "th e"), control=(END, "<|im_start|>", "<|im_end|>")))
    end, start = 258, 259
    assert tokenizer.encode(f"a<|im_start|>the{END}{END}") == [ord("a"), start, 257, end, end]
    assert tokenizer.decode([ord("a"), start, end]) == f"a<|im_start|>{END}"
    assert tokenizer.encode("<|im_star") == list(b"<|im_star")


def test_a_token_that_is_not_control_is_not_cut_out_of_words():
    metadata = byte_level(control=("lemon",))
    assert Tokenizer(metadata).encode("lemons") == [258, ord("s")]
    metadata["tokenizer.ggml.token_type"] = [NORMAL] * 259
    assert Tokenizer(metadata).encode("lemons") == list(b"lemons")


@pytest.mark.parametrize(("given_ids", "stop_ids"), [
    ({}, ()), ({"eos": 7}, (7,)), ({"eot": 9}, (9,)), ({"eos": 9, "eot": 7}, (7, 9)), ({"eos": 7, "eot": 7}, (7,)),
    ({"eos": 0}, (0,))])
def test_stop_ids_are_end_of_text_and_end_of_turn(given_ids, stop_ids):
    metadata = byte_level()
    del metadata["tokenizer.ggml.eos_token_id"]
    metadata |= {f"tokenizer.ggml.{name}_token_id": number for name, number in given_ids.items()}
    assert Tokenizer(metadata).stop_ids == stop_ids


NUMBERS = ("1 2", "12 3", "123 4")


@pytest.mark.parametrize(("pre", "pieces"), [("smollm", ["1", "2", "3", "4"]), ("gpt-2", ["1234"]),
                                             ("default", ["1234"]), ("llama-bpe", ["123", "4"])])
def test_how_digits_are_cut(pre, pieces):
    tokenizer = Tokenizer(byte_level(pre, NUMBERS))
    assert [tokenizer.decode([i]) for i in tokenizer.encode("1234")] == pieces


def test_llama_bpe_takes_a_word_that_is_a_token_whatever_the_merges():
    metadata = byte_level("llama-bpe", ("t h", "th e"))
    metadata["tokenizer.ggml.merges"] = ["t h"]
    assert Tokenizer(metadata).encode("the") == [257]


def test_a_missing_pre_is_that_of_gpt2():
    metadata = byte_level("gpt-2", NUMBERS)
    del metadata["tokenizer.ggml.pre"]
    assert len(Tokenizer(metadata).encode("1234")) == 1


# SentencePiece BPE

PIECES = {"▁": -9.0, "a": -10.0, "b": -11.0, "c": -12.0, "ab": -1.0, "bc": -2.0, "▁a": -3.0, "abc": -4.0, "ca": -5.0,
          "▁ab": -6.0, "aa": -6.5, "▁▁": -7.0, "▁abc": -7.5, "cab": -8.0}
SP_TEXT = st.text("aaabbbccc  é\n☃", max_size=24)


def greedy(metadata, text):
    """Oracle: merge the neighbours whose union scores best, the leftmost of equals; bytes for what is unknown."""
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    scores, prefix = metadata["tokenizer.ggml.scores"], metadata["tokenizer.ggml.add_space_prefix"]
    pieces = list(("▁" if prefix and text else "") + text.replace(" ", "▁"))
    while True:
        unions = [(-scores[ids[a + b]], at) for at, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in ids]
        if not unions:
            break
        at = min(unions)[1]
        pieces[at:at + 2] = [pieces[at] + pieces[at + 1]]
    return [i for piece in pieces
            for i in ([ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()])]


@pytest.mark.parametrize("prefix", [True, False])
@given(text=SP_TEXT)
@example(text="abcab aabc")
@example(text="é ab\n")
def test_sentencepiece_equals_the_greedy_oracle(prefix, text):
    metadata = sentencepiece(PIECES, prefix)
    assert Tokenizer(metadata).encode(text) == greedy(metadata, text)


@given(st.permutations(range(len(PIECES))), SP_TEXT)
def test_sentencepiece_equals_the_greedy_oracle_for_any_order_of_scores(order, text):
    metadata = sentencepiece(dict(zip(PIECES, map(float, order), strict=True)))
    assert Tokenizer(metadata).encode(text) == greedy(metadata, text)


@pytest.mark.parametrize("prefix", [True, False])
@given(text=st.text(st.characters(exclude_characters="▁", codec="utf-8")))
@example(text="  ab  ☃ <0x41>")
def test_sentencepiece_text_comes_back(prefix, text):
    tokenizer = Tokenizer(sentencepiece(PIECES, prefix))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_control_tokens_and_stop_ids():
    tokenizer = Tokenizer(sentencepiece(PIECES, space_prefix=False))
    assert tokenizer.encode("a<s>b</s>") == [tokenizer.encode("a")[0], 1, tokenizer.encode("b")[0], 2]
    assert tokenizer.stop_ids == (2,)


def test_sentencepiece_without_byte_tokens_gives_the_unknown_token():
    metadata = sentencepiece(PIECES, space_prefix=False)
    for key in ("tokens", "scores", "token_type"):
        values = metadata[f"tokenizer.ggml.{key}"]
        metadata[f"tokenizer.ggml.{key}"] = values[:3] + values[259:]
    assert 0 in Tokenizer(metadata).encode("a☃b")


# What is refused


@pytest.mark.parametrize(("changes", "hint"), [
    ({"tokenizer.ggml.pre": "deepseek-v9"}, "deepseek-v9"), ({"tokenizer.ggml.pre": "deepseek-v9"}, "smollm"),
    ({"tokenizer.ggml.model": "bert"}, "bert"), ({"tokenizer.ggml.model": "bert"}, "gpt2"),
    ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model"),
    ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
    ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges"),
    ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores"),
    ({"tokenizer.ggml.merges": ["t h", "x yz"]}, "yz"), ({"tokenizer.ggml.merges": ["t h", "th"]}, "merges")])
def test_a_tokenizer_that_is_unknown_or_not_whole(changes, hint):
    metadata = byte_level() | changes
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(KvminiError) as caught:
        Tokenizer(metadata)
    assert hint in str(caught.value) and "\n" not in str(caught.value)


# The real one


@pytest.mark.slow
def test_the_default_tokenizer_on_our_prose(loaded32):
    _, tokenizer = loaded32
    for name in ("calibration", "search", "report"):
        text = prose(name)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and len(ids) < len(text) / 3
    assert [tokenizer.decode([i]) for i in tokenizer.encode("abc 123")] == ["abc", " ", "1", "2", "3"]
    assert tokenizer.stop_ids == tuple(tokenizer.encode("<|im_end|>"))
