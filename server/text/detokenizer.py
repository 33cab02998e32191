"""Incremental detokenization, and the search for stop strings.

In most tokenizers each token stands for the same bytes wherever it occurs (byte-level BPE, and
SentencePiece with byte fallback): for these a table of bytes and an incremental UTF-8 decoder give
exactly the result of decoding everything at once. For the rest the tokenizers library's stream
decoder is used.
"""

import codecs
import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tokenizers.decoders import DecodeStream

from server.text.markers import certain_length
from server.text.tokenizer import ServedTokenizer

_SPACE_MARK = "\u2581"
# A stream decoder may need some context to place spaces.
_CONTEXT_TOKENS = 5
_MAX_HELD_TOKENS = 16


class TokenDecoder(Protocol):
    """Incremental decoder of one sequence of tokens; never splits a character."""

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is now certain, often but not always the token's."""
        ...

    def push_all(self, token_ids: Sequence[int], *, last: bool) -> str:
        """Add tokens, and flush if `last`; return the text that is now certain."""
        ...

    def flush(self) -> str:
        """End of input: return the remaining text, with U+FFFD for an incomplete character."""
        ...


# -- bytes of tokens -----------------------------------------------------------------------------


_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + position): byte
    for position, byte in enumerate(sorted({*range(256)} - {*_PRINTABLE}))
}
"""The byte of each character in byte-level vocabularies.

Printable Latin-1 characters stand for themselves, the other bytes are mapped to U+0100 and up, in
order.
"""


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return token.encode()
    return token.replace(_SPACE_MARK, " ").encode()


def _spelling(tokenizer: ServedTokenizer) -> Callable[[str], bytes] | None:
    """Return a function from tokens to bytes, or None if a token's text depends on its context."""
    decoder = json.loads(tokenizer.backend.to_str())["decoder"]
    if decoder is None:
        return None
    steps: list[dict[str, Any]] = (
        decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    )
    kinds = [step["type"] for step in steps if step["type"] != "Fuse"]
    if kinds == ["ByteLevel"]:
        return _byte_level
    replaces_mark = {
        "type": "Replace", "pattern": {"String": _SPACE_MARK}, "content": " ",
    } in steps  # fmt: skip
    if replaces_mark and kinds in (
        ["Replace", "ByteFallback"],
        ["Replace", "ByteFallback", "Strip"],
    ):
        return _byte_fallback
    return None


class TokenTable:
    """The bytes of each token of a vocabulary, computed lazily."""

    def __init__(self, tokenizer: ServedTokenizer) -> None:
        self.tokenizer = tokenizer
        self._spelling = _spelling(tokenizer)
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, str] = {}
        self._texts: tuple[dict[int, str | None], dict[int, str | None]] = ({}, {})

    def bytes_of(self, token_id: int) -> bytes:
        """Return a token's bytes; special tokens have those of their text."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def name_of(self, token_id: int) -> str:
        """Return a token's text for display; invalid UTF-8 as `bytes:\\xe2\\x80`."""
        known = self._names.get(token_id)
        if known is None:
            raw = self.bytes_of(token_id)
            try:
                known = raw.decode()
            except UnicodeDecodeError:
                known = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            self._names[token_id] = known
        return known

    def decoder(self, *, skip_special_tokens: bool, context: Sequence[int] = ()) -> TokenDecoder:
        """Return a decoder for a sequence that continues after the tokens in `context`."""
        if self._spelling is None:
            return _StreamDecoder(self.tokenizer, skip_special_tokens, context[-_CONTEXT_TOKENS:])
        return _BytesDecoder(self, self._texts[skip_special_tokens], skip_special_tokens)

    def _spell(self, token_id: int) -> bytes:
        token = self.tokenizer.id_to_token(token_id)
        if self._spelling is None:
            return self.tokenizer.decode([token_id], skip_special_tokens=False).encode()
        return self._spelling(token)


class _BytesDecoder:
    """Decoder for vocabularies whose tokens have fixed bytes."""

    __slots__ = ("_pending", "_skip_special_tokens", "_table", "_texts")

    def __init__(
        self, table: TokenTable, texts: dict[int, str | None], skip_special_tokens: bool
    ) -> None:
        self._table = table
        self._texts = texts
        self._skip_special_tokens = skip_special_tokens
        self._pending = b""

    def push(self, token_id: int) -> str:
        try:
            text = self._texts[token_id]
        except KeyError:
            text = self._learn(token_id)
        if text is not None and not self._pending:
            return text
        if text == "":
            return ""
        data = self._pending + self._table.bytes_of(token_id)
        decoded, consumed = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[consumed:]
        return decoded

    def push_all(self, token_ids: Sequence[int], *, last: bool) -> str:
        if len(token_ids) == 1:
            text = self.push(token_ids[0])
        else:
            text = "".join([self.push(token_id) for token_id in token_ids])
        return text + self.flush() if last and self._pending else text

    def flush(self) -> str:
        decoded = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return decoded

    def _learn(self, token_id: int) -> str | None:
        """Cache a token's text if it is whole characters, else None."""
        text: str | None
        if self._skip_special_tokens and self._table.tokenizer.is_special(token_id):
            text = ""
        else:
            try:
                text = self._table.bytes_of(token_id).decode()
            except UnicodeDecodeError:
                text = None
        self._texts[token_id] = text
        return text


class _StreamDecoder:
    """Decoder for all other vocabularies."""

    def __init__(
        self, tokenizer: ServedTokenizer, skip_special_tokens: bool, context: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = self._open(context)
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        self._held.append(token_id)
        try:
            text = self._stream.step(self._tokenizer.backend, token_id)
        except Exception:  # raised if a token changes the text of earlier ones
            return self._restart()
        if text is not None:
            self._held.clear()
            return text
        return self._restart() if len(self._held) > _MAX_HELD_TOKENS else ""

    def push_all(self, token_ids: Sequence[int], *, last: bool) -> str:
        text = "".join([self.push(token_id) for token_id in token_ids])
        return text + self.flush() if last else text

    def flush(self) -> str:
        return self._restart()

    def _restart(self) -> str:
        held, self._held = self._held, []
        self._stream = self._open(held[-_CONTEXT_TOKENS:])
        return self._tokenizer.decode(held, skip_special_tokens=self._skip_special_tokens)

    def _open(self, context: Sequence[int]) -> DecodeStream:
        return DecodeStream(ids=list(context), skip_special_tokens=self._skip_special_tokens)


# -- stop strings --------------------------------------------------------------------------------


class StopStrings:
    """Finds the first stop string in incremental text.

    Of several, the one that is completed first ends the text; of those completed at the same
    character, the longest. So the result does not depend on how the text was split into pieces.
    Text that may be the start of a stop string is held back until that is decided.
    """

    def __init__(self, strings: Sequence[str], *, include: bool) -> None:
        """Search for `strings` (none empty); `include` keeps the one found in the text."""
        self._strings = strings
        self._include = include
        self._held = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Add text; return what is certain. Once `found` is set, the text has ended."""
        text = self._held + piece
        found = [(text.find(string), string) for string in self._strings if string in text]
        if found:
            start, string = min(found, key=lambda each: (each[0] + len(each[1]), each[0]))
            self.found = string
            self._held = ""
            return text[: start + len(string) if self._include else start]
        keep = certain_length(text, self._strings)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """End of input: return the text held back."""
        held, self._held = self._held, ""
        return held
