"""Texts whose tokens stand for images, kept apart from the same texts when clients write them.

What clients write is hidden behind characters of their own before a template renders it, and
tokenized as plain text afterwards. So every such token of a prompt is one that an image has.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

IMAGE = "\U0010f000"
"""Stands for an image in the content of a message, until a template has rendered it."""
PART = "\U0010f001"
"""Stands between two parts of a content."""

_FIRST_HIDDEN = 0x10F010
_OWN = re.compile("[\U0010f000-\U0010f0ff]")
"""Characters that mean something here. Nothing else uses them: they are for private use."""


class Placeholders:
    """The texts of a model that only images may bring into a prompt."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(dict.fromkeys(texts))
        self._hidden = {chr(_FIRST_HIDDEN + i): text for i, text in enumerate(self.texts)}
        self._marks = re.compile(f"([{''.join(self._hidden)}])")

    def hide(self, value: Any) -> Any:
        """Return texts, also those in lists and objects, with nothing in them that is reserved."""
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
        """Return a text as it was before it was hidden."""
        return self._marks.sub(lambda found: self._hidden[found[0]], text)

    def hides(self, text: str) -> bool:
        """Whether something is hidden in a text."""
        return self._marks.search(text) is not None

    def pieces(self, text: str) -> Iterator[str]:
        """Yield a text in pieces whose tokens, each by itself, stand for no image."""
        for piece in self._marks.split(text):
            plain = self._hidden.get(piece)
            if plain is not None:
                yield plain[:-1]
                yield plain[-1:]
            elif piece:
                yield piece


def content_parts(content: str, *, images: bool) -> list[dict[str, Any]]:
    """Return a content as the list of parts that templates of vision models take.

    With `images` there are marks in it: texts on both sides of one are parts of their own, as
    clients sent them.
    """
    parts: list[dict[str, Any]] = []
    for piece in re.split(f"([{IMAGE}{PART}])", content) if images else [content]:
        if images and piece == IMAGE:
            parts.append({"type": "image"})
        elif piece and not (images and piece == PART):
            parts.append({"type": "text", "text": piece})
    return parts or [{"type": "text", "text": ""}]
