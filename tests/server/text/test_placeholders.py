"""Image placeholders in client text are masked, tokenized as plain text, and restored."""

import pytest
from tokenizers import AddedToken, Tokenizer, processors

from server.text.placeholders import IMAGE, PART, Placeholders, content_parts
from server.text.tokenizer import ServedTokenizer
from tests.server.tokens import id_of

PLACEHOLDERS = Placeholders(["<image>", "<soft>", "<image>"])


def test_reserved_texts_are_escaped_everywhere() -> None:
    value = {"a<image>": ["<soft>", 3, None, ("b<image><image>",)], "c": {"d": "e"}}
    hidden = PLACEHOLDERS.hide(value)
    assert "<image>" not in repr(hidden)
    assert "<soft>" not in repr(hidden)
    assert hidden["c"] == {"d": "e"}
    (key, (soft, three, none, [twice])), _ = hidden.items()
    shown = [PLACEHOLDERS.show(each) for each in (key, soft, twice)]
    assert [*shown, three, none] == ["a<image>", "<soft>", "b<image><image>", 3, None]


def test_marker_characters_of_clients_are_replaced() -> None:
    assert PLACEHOLDERS.hide(f"a{IMAGE}b{PART}c\U0010f010d") == "a\ufffdb\ufffdc\ufffdd"


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("", [""]),
        ("a", ["a"]),
        (IMAGE, [None]),
        (f"a{PART}{IMAGE}{PART}b{PART}c", ["a", None, "b", "c"]),
        (f"{IMAGE}{PART}{IMAGE}", [None, None]),
    ],
)
def test_a_content_with_marks_becomes_parts(content: str, parts: list[str | None]) -> None:
    expected = [
        {"type": "image"} if part is None else {"type": "text", "text": part} for part in parts
    ]
    assert content_parts(content, images=True) == expected


def test_marks_in_a_content_without_images_are_text() -> None:
    text = f"a{IMAGE}b"
    assert content_parts(text, images=False) == [{"type": "text", "text": text}]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("text", ["<image>", "hello <image> world<image>", "a", ""])
def test_hidden_texts_have_the_tokens_of_plain_text(
    backend: Tokenizer, text: str, special: bool
) -> None:
    own = Tokenizer.from_str(backend.to_str())
    own.add_special_tokens([AddedToken("<image>", special=True)])
    ends = [("<|eos|>", id_of(own, "<|eos|>"))]
    own.post_processor = processors.TemplateProcessing(
        single="<|eos|> $A <|eos|>", special_tokens=ends
    )
    tokenizer = ServedTokenizer(own, placeholders=PLACEHOLDERS)
    hidden = PLACEHOLDERS.hide(text)
    ids = tokenizer.encode(hidden, add_special_tokens=special)
    assert tokenizer.encode_many([hidden, "x"], add_special_tokens=special)[0] == ids
    assert id_of(own, "<image>") not in ids
    assert tokenizer.placeholder_ids == {id_of(own, "<image>")}
    around = "<|eos|>" if special else ""
    decoded = tokenizer.decode(ids, skip_special_tokens=False)
    assert decoded == f"{around}{text}{around}"
