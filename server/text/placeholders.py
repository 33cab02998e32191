"""Image placeholder texts, distinguished from the same text written by clients.

Client text is escaped with private-use characters before a template renders it, and afterwards
tokenized as plain text. So every placeholder token of a prompt belongs to an image.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

IMAGE = "\U0010f000"
"""Stands for an image in the content of a message until the template is rendered."""
PART = "\U0010f001"
"""Separates two parts of a content."""

_FIRST_HIDDEN = 0x10F010
_OWN = re.compile("[\U0010f000-\U0010f0ff]")
"""Reserved characters of this module, from a private-use area."""


class Placeholders:
    """The placeholder texts of a model, which only images may bring into a prompt."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(dict.fromkeys(texts))
        self._hidden = {chr(_FIRST_HIDDEN + i): text for i, text in enumerate(self.texts)}
        self._marks = re.compile(f"([{''.join(self._hidden)}])")

    def hide(self, value: Any) -> Any:
        """Escape reserved text in a string, or in all strings of a list or object."""
        match value:
            case str():
                value = _OWN.sub("\ufffd", value)
                for mark, text in self._hidden.items():
                    if text in value:
                        value = value.replace(text, mark)
                return value
            case dict():
                return {self.hide(name): self.hide(each) for name, each in value.items()}
            case list() | tuple():
                return [self.hide(each) for each in value]
            case _:
                return value

    def show(self, text: str) -> str:
        """Undo the escaping of a text."""
        return self._marks.sub(lambda found: self._hidden[found[0]], text)

    def hides(self, text: str) -> bool:
        """Return whether a text contains escaped text."""
        return self._marks.search(text) is not None

    def pieces(self, text: str) -> Iterator[str]:
        """Yield a text in pieces, none of which is tokenized to an image token."""
        for piece in self._marks.split(text):
            plain = self._hidden.get(piece)
            if plain is not None:
                yield plain[:-1]
                yield plain[-1:]
            elif piece:
                yield piece


def content_parts(content: str, *, images: bool) -> list[dict[str, Any]]:
    """Return a content as a list of parts, as templates of vision models expect.

    With `images` it contains placeholders: texts on both sides of one become separate parts, as
    clients sent them.
    """
    parts: list[dict[str, Any]] = []
    for piece in re.split(f"([{IMAGE}{PART}])", content) if images else [content]:
        if images and piece == IMAGE:
            parts.append({"type": "image"})
        elif piece and not (images and piece == PART):
            parts.append({"type": "text", "text": piece})
    return parts or [{"type": "text", "text": ""}]
