"""Tokenizers from GGUF files encode and decode like the originals."""

from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.shared.gguf.reader import BadGguf
from engine.shared.gguf.vocabulary import special_tokens, tokenizer_of

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def made(**metadata: Any) -> Tokenizer:
    import json

    found = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return Tokenizer.from_str(json.dumps(tokenizer_of(found)))


def byte_level(**changes: Any) -> dict[str, Any]:
    tokens = ["<end>", "h", "i", "hi", "1", "2", "12", "Ġ", "Ġhi", "<tool>"]
    return {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [3, 1, 1, 1, 1, 1, 1, 1, 1, 4],
        "merges": ["h i", "1 2", "Ġ hi"],
        "eos_token_id": 0,
        **changes,
    }


def sentence_piece(**changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", "<0xC3>", "<0x9F>", SPACE, "a", "b", SPACE + "a", "ab"]
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0, 0.0, 0.0, 0.0, 0.0, -3.0, -4.0, -5.0, -2.0, -1.0],
        "token_type": [2, 3, 3, 6, 6, 1, 1, 1, 1, 1],
        "bos_token_id": 1,
        "unknown_token_id": 0,
        **changes,
    }


def test_byte_level_tokens_are_merged_and_special_ones_found() -> None:
    tokenizer = made(**byte_level())
    assert tokenizer.encode("hi hi<end>").tokens == ["hi", "Ġhi", "<end>"]
    assert tokenizer.decode([3, 8, 9, 0], skip_special_tokens=True) == "hi hi<tool>"


def test_digits_are_split_as_in_the_model() -> None:
    assert made(**byte_level()).encode("12").tokens == ["1", "2"]
    assert made(**byte_level(pre="gpt-2")).encode("12").tokens == ["12"]
    assert made(**byte_level(pre="llama-bpe")).encode("12").tokens == ["12"]
    assert made(**byte_level(pre="qwen2")).encode("12").tokens == ["1", "2"]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("llama-bpe", ["HelloWorld", "'s", " ", "123", "4", " x"]),
        ("glm4", ["HelloWorld", "'s", " ", "123", "4", " x"]),
        ("qwen2", ["HelloWorld", "'s", " ", "1", "2", "3", "4", " x"]),
        ("gpt-4o", ["Hello", "World's", " ", "123", "4", " x"]),
        ("tekken", ["Hello", "World", "'s", " ", "1", "2", "3", "4", " x"]),
        ("deepseek-v3", ["HelloWorld", "'s", " ", "123", "4", " x"]),
        ("command-r", ["HelloWorld", "'s", " ", "1", "2", "3", "4", " x"]),
    ],
)
def test_texts_are_pretokenized_as_in_each_model(pre: str, pieces: list[str]) -> None:
    cut = made(**byte_level(pre=pre)).pre_tokenizer.pre_tokenize_str("HelloWorld's 1234 x")
    assert [piece.replace("Ġ", " ") for piece, _ in cut] == pieces


def test_sentence_piece_merges_by_scores_and_falls_back_to_bytes() -> None:
    tokenizer = made(**sentence_piece())
    assert tokenizer.encode("ab").tokens == ["<s>", SPACE, "ab"]
    assert tokenizer.encode("aß", add_special_tokens=False).tokens == [
        SPACE + "a",
        "<0xC3>",
        "<0x9F>",
    ]
    assert tokenizer.decode([8, 3, 4]) == "aß"
    assert made(**sentence_piece(add_bos_token=False)).encode("ab").tokens == [SPACE, "ab"]
    assert made(**sentence_piece(add_space_prefix=False)).encode("ab").tokens == ["<s>", "ab"]


def test_llama_3_adds_bos_token_unless_file_disables_it() -> None:
    numbered = {"bos_token_id": 0}
    for pre in ("llama-bpe", "llama-v3", "llama3"):
        assert made(**byte_level(pre=pre, **numbered)).encode("hi").tokens == ["<end>", "hi"]
    for pre in ("smollm", "qwen2"):
        assert made(**byte_level(pre=pre, **numbered)).encode("hi").tokens == ["hi"]
    told = byte_level(pre="llama-bpe", add_bos_token=False, **numbered)
    assert made(**told).encode("hi").tokens == ["hi"]


def test_eos_token_is_added_if_file_enables_it() -> None:
    assert made(**byte_level(add_eos_token=True)).encode("hi").tokens == ["hi", "<end>"]
    both = sentence_piece(eos_token_id=2, add_eos_token=True)
    assert made(**both).encode("ab").tokens == ["<s>", SPACE, "ab", "</s>"]
    assert made(**both).encode("ab", add_special_tokens=False).tokens == [SPACE, "ab"]


def test_named_tokens_are_reported() -> None:
    found = {f"tokenizer.ggml.{key}": value for key, value in sentence_piece().items()}
    assert special_tokens(found) == {"bos_token": "<s>", "unk_token": "<unk>"}


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        (byte_level(model="rwkv"), "type 'rwkv'"),
        (byte_level(pre="falcon"), "'falcon'.*smollm"),
        (byte_level(tokens=None), "no tokenizer.ggml.tokens"),
        (byte_level(tokens=[]), "out of range"),
        (byte_level(tokens=["a", "a"]), "duplicate"),
        (byte_level(tokens=["a", 5]), "holds no tokenizer"),
        (byte_level(merges=["h x"]), "not a token"),
        (byte_level(merges=["h"]), "not a token"),
        (sentence_piece(scores=[1.0]), "scores"),
        (sentence_piece(unknown_token_id=10), "unknown_token_id 10 is no token of 10"),
        (sentence_piece(unknown_token_id=-1), "unknown_token_id -1 is no token"),
        (sentence_piece(bos_token_id=1 << 40), "bos_token_id"),
        (sentence_piece(scores=[0.0] * 2, tokens=["a" * 9000, "a" * 9001]), "too long"),
    ],
)
def test_invalid_tokenizers_are_refused(metadata: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadGguf, match=reason):
        made(**metadata)
