"""Search for markers in incremental text."""

from collections.abc import Sequence

MAX_HEAD = 1024
"""Maximum characters of a format's start or name. Text up to it is rescanned with each piece, so it
has to be bounded: anything longer is content."""


def find_first(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Return the offset of the first marker, and the longest marker that starts there."""
    found = [(text.find(marker), -len(marker), marker) for marker in markers]
    start, _, marker = min(
        ((start, size, marker) for start, size, marker in found if start >= 0),
        default=(-1, 0, ""),
    )
    return None if start < 0 else (start, marker)


def certain_length(text: str, markers: Sequence[str]) -> int:
    """Return the length of the prefix, in text without markers, that cannot start one."""
    certain = len(text)
    for marker in markers:
        start = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while 0 <= start < certain:
            if marker.startswith(text[start:]):
                certain = start
                break
            start = text.find(marker[0], start + 1)
    return certain


class MarkerSearch:
    """Finds the first of some markers in text of any length, scanning each piece once."""

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = markers
        self._overlap = max(map(len, markers)) - 1
        self._pieces: list[str] = []
        self._tail = ""
        """The end of the text so far, in which a marker may have started."""

    def push(self, text: str) -> tuple[str, str, str] | None:
        """Add text; return the text before the marker, the marker, and the rest, once found."""
        searched = self._tail + text
        found = find_first(searched, self._markers)
        if found is None:
            self._pieces.append(text)
            self._tail = searched[max(0, len(searched) - self._overlap) :]
            return None
        start, marker = found
        whole = "".join(self._pieces) + text
        start += len(whole) - len(searched)
        return whole[:start], marker, whole[start + len(marker) :]
