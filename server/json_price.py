"""What a JSON text would cost to parse, found without parsing it.

A parser makes an object of every value and every key, so two megabytes of `[0,0,0` can become a
gigabyte. Here only characters are counted, in a few passes that run in C, a part of the text at a
time: what waits for the same thread has its turn in between. Of valid JSON the price is exact where
it could be too much; of other texts it is not less than what a parser makes of them before it finds
them wrong.
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
"""Of a text that are looked at in one go, about half a millisecond."""
_NAMED_BYTES = 1 << 20
"""Of a text in which the field that is too costly is looked for, in some milliseconds."""
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\x00\x00")


class TooCostly(Exception):
    """A JSON text has more of something than is taken; the message is for the client."""


class Price(NamedTuple):
    """What a text holds."""

    values: int = 1
    """Values and keys."""
    containers: int = 0
    """Arrays and objects among them."""
    depth: int = 0
    """Most containers around a value."""

    def plus(self, other: "Price") -> "Price":
        """Return the price of both."""
        return Price(
            self.values + other.values,
            self.containers + other.containers,
            max(self.depth, other.depth),
        )

    def check(self) -> None:
        """Compare with what one request may hold.

        Raises:
            TooCostly: it is more.
        """
        for count, limit, what in (
            (self.values, MAX_JSON_VALUES, "values and keys"),
            (self.containers, MAX_JSON_CONTAINERS, "arrays and objects"),
            (self.depth, MAX_JSON_DEPTH, "levels of arrays and objects"),
        ):
            if count > limit:
                raise TooCostly(f"more than {limit} {what}")


def check_price(text: bytes) -> None:
    """Compare a text's price with what one request may hold.

    Raises:
        TooCostly: it is more.
    """
    for _ in checked_parts(text):
        pass


def checked_parts(text: bytes) -> Iterator[None]:
    """Compare a text's price with what one request may hold, and yield after each part of it.

    Raises:
        TooCostly: it is more.
    """
    # So short a text has few values and containers, and so few brackets are not deep.
    if len(text) > MAX_JSON_CONTAINERS or text.count(b"[") + text.count(b"{") > MAX_JSON_DEPTH:
        for _ in _prices(text):
            yield


def costly_field(text: bytes) -> str | None:
    """Return the first field of an object that is too costly by itself.

    None if no single one is, or if it would take long to find out.
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
        TooCostly: it is more than one request may hold.
    """
    *_, found = _prices(text)
    return found


def _prices(text: bytes) -> Iterator[Price]:
    """Yield the price of the text up to the end of each of its parts.

    Raises:
        TooCostly: it is more than one request may hold.
    """
    found, level, start, inside = Price(), 0, 0, False
    while True:
        part = text[start : start + _PART_BYTES]
        # What a backslash stands before is in the same part.
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
            # A parser does not come further: more are closed than were opened.
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
    """Return the characters of structure in no string, and whether the last string goes on."""
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in text else text
    # Strings without such characters in them are pairs of quotes now.
    left = plain.translate(None, _TEXT_WITHOUT_QUOTES).replace(b'""', b"")
    return _STRING.sub(b"", left), left.count(b'"') % 2 == 1
