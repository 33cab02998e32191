"""The search for markers in text that comes in pieces."""

from collections.abc import Sequence


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


def split_at(text: str, markers: Sequence[str]) -> tuple[str, str, str]:
    """Return what is certain before the first marker, the marker, and the rest.

    Without a marker, which is "" then, the rest is what may still become the beginning of one.
    """
    found = find_first(text, markers)
    if found is None:
        length = certain_length(text, markers)
        return text[:length], "", text[length:]
    start, marker = found
    return text[:start], marker, text[start + len(marker) :]
