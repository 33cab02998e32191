"""Cost of parsing a JSON text, computed without parsing it.

A parser creates an object for every value and key, so two megabytes of `[0,0,0` can become a
gigabyte. Here only characters are counted, in a few passes that run in C, on one part of the text
at a time, so that callers can yield in between. For valid JSON near or above the limits the cost is
exact; for invalid text it is at least what a parser creates before it finds the error.
"""

import re
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import msgspec

from server.limits import MAX_JSON_CONTAINERS, MAX_JSON_DEPTH, MAX_JSON_VALUES, MAX_KEYS

_STRUCTURE = b",:[]{}"
_TEXT = bytes(set(range(256)) - set(_STRUCTURE))
_TEXT_WITHOUT_QUOTES = bytes(set(_TEXT) - set(b'"'))
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STRING = re.compile(rb'"[^"]*"?')
_PART_BYTES = 1 << 15
"""Bytes of a text processed without yielding, about 0.5 ms."""
_NAMED_BYTES = 1 << 20
"""Maximum bytes of a text in which the costly field is searched for, in a few milliseconds."""
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\x00\x00")


class TooCostly(Exception):
    """A JSON text exceeds a limit; the message is for the client."""


class Price(NamedTuple):
    """Number of objects in a JSON text."""

    values: int = 1
    """Values and keys."""
    containers: int = 0
    """Arrays and objects among them."""
    depth: int = 0
    """Maximum nesting depth of containers."""

    def plus(self, other: "Price") -> "Price":
        """Return the combined price of two texts."""
        return Price(
            self.values + other.values,
            self.containers + other.containers,
            max(self.depth, other.depth),
        )

    def check(self) -> None:
        """Check the price against the limits for one request.

        Raises:
            TooCostly: a limit is exceeded.
        """
        for count, limit, what in (
            (self.values, MAX_JSON_VALUES, "values and keys"),
            (self.containers, MAX_JSON_CONTAINERS, "arrays and objects"),
            (self.depth, MAX_JSON_DEPTH, "levels of arrays and objects"),
        ):
            if count > limit:
                raise TooCostly(f"more than {limit} {what}")


def check_price(text: bytes) -> None:
    """Check a text's price against the limits for one request.

    Raises:
        TooCostly: a limit is exceeded.
    """
    for _ in checked_parts(text):
        pass


def checked_parts(text: bytes) -> Iterator[None]:
    """Check a text's price against the limits for one request, yielding after each part.

    Raises:
        TooCostly: a limit is exceeded.
    """
    # Such short texts have few values and containers, and with few brackets they are not deep.
    if len(text) > MAX_JSON_CONTAINERS or text.count(b"[") + text.count(b"{") > MAX_JSON_DEPTH:
        for _ in _prices(text):
            yield


def costly_field(text: bytes) -> str | None:
    """Return the first field of an object that alone exceeds a limit.

    None if no single one does, or if the search would take too long.
    """
    if len(text) > _NAMED_BYTES or text.count(b":") > MAX_KEYS:
        return None
    try:
        fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError):
        return None
    for name, value in fields.items():
        try:
            check_price(bytes(value))
        except TooCostly:
            return name
    return None


def price(text: bytes) -> Price:
    """Return the price of a text.

    Raises:
        TooCostly: a limit for one request is exceeded.
    """
    *_, found = _prices(text)
    return found


def _prices(text: bytes) -> Iterator[Price]:
    """Yield the cumulative price after each part of the text."""
    found, level, start, inside = Price(), 0, 0, False
    while True:
        part = text[start : start + _PART_BYTES]
        # Keep a backslash and the character that it escapes in the same part.
        cut = (len(part) - len(part.rstrip(b"\\"))) % 2 and start + len(part) < len(text)
        part = part[:-1] if cut else part
        start += len(part)
        structure, inside = _outside_strings(b'"' + part if inside else part)
        brackets = structure.translate(None, _NOT_BRACKETS)
        opened = brackets.count(b"[") + brackets.count(b"{")
        containers = found.containers + opened
        values = found.values + structure.count(b",") + structure.count(b":") + opened
        depth = min(containers, MAX_JSON_DEPTH)
        if MAX_JSON_DEPTH < containers <= MAX_JSON_CONTAINERS:
            # A parser stops where more brackets are closed than were opened.
            counted = brackets[: 2 * containers + 1].translate(_STEPS)
            steps = (1 if step else -1 for step in counted)
            depth = max(found.depth, max(accumulate(steps, initial=level)))
        level += 2 * opened - len(brackets)
        found = Price(values, containers, depth)
        found.check()
        yield found
        if start >= len(text):
            return


def _outside_strings(text: bytes) -> tuple[bytes, bool]:
    """Return the structural characters outside strings, and whether the last string is open."""
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in text else text
    # Strings without structural characters are reduced to pairs of quotes.
    left = plain.translate(None, _TEXT_WITHOUT_QUOTES).replace(b'""', b"")
    return _STRING.sub(b"", left), left.count(b'"') % 2 == 1
