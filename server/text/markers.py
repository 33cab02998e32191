"""The search for markers in text that comes in pieces."""

from collections.abc import Sequence

MAX_HEAD = 1024
"""Characters within which what a format begins with, or names, has to come. Until then all of them
are looked at again with each piece, so they are not any number: what is longer is content."""


def find_first(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Return where the first marker begins and which it is, the longest where several begin."""
    found = [(text.find(marker), -len(marker), marker) for marker in markers]
    start, _, marker = min(
        ((start, size, marker) for start, size, marker in found if start >= 0),
        default=(-1, 0, ""),
    )
    return None if start < 0 else (start, marker)


def certain_length(text: str, markers: Sequence[str]) -> int:
    """Return how much of a text that holds no marker cannot be the beginning of one."""
    certain = len(text)
    for marker in markers:
        start = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while 0 <= start < certain:
            if marker.startswith(text[start:]):
                certain = start
                break
            start = text.find(marker[0], start + 1)
    return certain


class Until:
    """Text of any length up to the first of some markers, each piece of which is read once."""

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = markers
        self._overlap = max(map(len, markers)) - 1
        self._pieces: list[str] = []
        self._tail = ""
        """The end of what has come, in which a marker may have begun."""

    def push(self, text: str) -> tuple[str, str, str] | None:
        """Add text; return what came before the marker, the marker, and the rest, once it comes."""
        seen = self._tail + text
        found = find_first(seen, self._markers)
        if found is None:
            self._pieces.append(text)
            self._tail = seen[max(0, len(seen) - self._overlap) :]
            return None
        start, marker = found
        whole = "".join(self._pieces) + text
        start += len(whole) - len(seen)
        return whole[:start], marker, whole[start + len(marker) :]
