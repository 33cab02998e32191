import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from server.text.detokenizer import StopStrings, TokenTable
from server.text.tokenizer import ServedTokenizer
from tests.server.tokens import id_of

TEXTS = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs"])
    | st.sampled_from("🙂👩‍👧你こé«»\ufffd "),
    max_size=40,
)


def pieces_of(table: TokenTable, ids: list[int], *, skip: bool) -> list[str]:
    decoder = table.decoder(skip_special_tokens=skip)
    return [decoder.push(token_id) for token_id in ids] + [decoder.flush()]


@given(text=TEXTS)
def test_decoded_text_is_complete_without_split_characters(
    tokenizer: ServedTokenizer, text: str
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = pieces_of(TokenTable(tokenizer), ids, skip=True)
    assert "".join(pieces) == text
    assert pieces[-1] == ""


@given(ids=st.lists(st.integers(0, 340), max_size=30), skip=st.booleans())
def test_tokens_decode_incrementally_as_at_once(
    tokenizer: ServedTokenizer, ids: list[int], skip: bool
) -> None:
    pieces = pieces_of(TokenTable(tokenizer), ids, skip=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_an_incomplete_character_at_the_end_is_replaced_once(tokenizer: ServedTokenizer) -> None:
    ids = [id_of(tokenizer.backend, token) for token in "aðŁĻ"]
    assert pieces_of(TokenTable(tokenizer), ids, skip=True) == ["a", "", "", "", "\ufffd"]


def sentencepiece_like() -> ServedTokenizer:
    words = ["<s>", "▁hello", "▁", "h", "é", "lo", "▁▁▁", *(f"<0x{i:02X}>" for i in range(256))]
    backend = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>"])
    return ServedTokenizer(backend)


@given(
    pieces=st.lists(st.sampled_from(["▁hello", "▁", "h", "é", "lo", "▁▁▁", "<s>", "€", "🙂"])),
)
def test_byte_fallback_tokens_decode_incrementally_as_at_once(pieces: list[str]) -> None:
    tokenizer = sentencepiece_like()
    ids: list[int] = []
    for piece in pieces:
        token_id = tokenizer.backend.token_to_id(piece)
        spelled = piece.encode() if token_id is None else b""
        ids += [id_of(tokenizer.backend, f"<0x{byte:02X}>") for byte in spelled]
        ids += [] if token_id is None else [token_id]
    text = "".join(pieces_of(TokenTable(tokenizer), ids, skip=True))
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assert text in (whole, " " + whole), "only the space that joins it to the prompt may differ"


def test_other_vocabularies_use_library_decoder() -> None:
    vocabulary = {"[UNK]": 0, "play": 1, "##ing": 2, "chess": 3}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    table = TokenTable(ServedTokenizer(backend))
    assert "".join(pieces_of(table, [1, 2, 3], skip=True)) == "playing chess"


def test_endless_invalid_bytes_are_emitted_immediately(tokenizer: ServedTokenizer) -> None:
    token_id = id_of(tokenizer.backend, "Ģ")
    pieces = pieces_of(TokenTable(tokenizer), [token_id] * 50, skip=True)
    assert "".join(pieces) == "\ufffd" * 50
    assert "" not in pieces[:-1]


def test_tokens_have_names_and_bytes(tokenizer: ServedTokenizer) -> None:
    table = TokenTable(tokenizer)
    space = id_of(tokenizer.backend, "Ġ")
    broken = id_of(tokenizer.backend, "ð")
    assert (table.name_of(space), table.bytes_of(space)) == (" ", b" ")
    assert (table.name_of(broken), table.bytes_of(broken)) == ("bytes:\\xf0", b"\xf0")
    assert table.name_of(10**6) == ""


# -- stop strings --------------------------------------------------------------------------------


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Cut at the match that ends first, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    text=st.text("abc", max_size=24),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 5), min_size=24, max_size=24),
    include=st.booleans(),
)
def test_stop_strings_are_found_across_pieces(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    search = StopStrings(stops, include=include)
    shown, rest = "", text
    for cut in cuts:
        if not rest or search.found is not None:
            break
        shown += search.push(rest[:cut])
        rest = rest[cut:]
        expected, _ = reference(text, stops, include)
        assert expected.startswith(shown), "what was shown is never taken back"
    shown += search.flush()
    assert (shown, search.found) == reference(text, stops, include)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("hello", "hello"), ("hello E", "hello "), ("hello EN", "hello "), ("hello ENx", "hello ENx")],
)
def test_only_possible_prefix_of_stop_string_is_held_back(text: str, shown: str) -> None:
    search = StopStrings(["END"], include=False)
    assert search.push(text) == shown
    assert shown + search.flush() == text
