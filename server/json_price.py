"""What a JSON text would cost to parse, found without parsing it.

A parser makes an object of every value and every key, so two megabytes of `[0,0,0` can become a
gigabyte. Here only characters are counted, in a few passes that run in C. Of valid JSON the price
is exact where it could be too much; of other texts it is not less than what a parser makes of
them before it finds them wrong.
"""

import re
from itertools import accumulate
from typing import NamedTuple

import msgspec

from server.limits import MAX_JSON_CONTAINERS, MAX_JSON_DEPTH, MAX_JSON_VALUES, MAX_KEYS

_STRUCTURE = b",:[]{}"
_TEXT = bytes(set(range(256)) - set(_STRUCTURE))
_TEXT_WITHOUT_QUOTES = bytes(set(_TEXT) - set(b'"'))
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STRING = re.compile(rb'"[^"]*"?')
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
        for count, most, what in (
            (self.values, MAX_JSON_VALUES, "values and keys"),
            (self.containers, MAX_JSON_CONTAINERS, "arrays and objects"),
            (self.depth, MAX_JSON_DEPTH, "levels of arrays and objects"),
        ):
            if count > most:
                raise TooCostly(f"more than {most} {what}")


def check_price(text: bytes) -> None:
    """Compare a text's price with what one request may hold.

    Raises:
        TooCostly: it is more.
    """
    # So short a text has few values and containers, and so few brackets are not deep.
    short = len(text) <= MAX_JSON_CONTAINERS
    if not short or text.count(b"[") + text.count(b"{") > MAX_JSON_DEPTH:
        price(text).check()


def costly_field(text: bytes) -> str | None:
    """Return the first field of an object that is too costly by itself.

    None if no single one is, or if it would take long to find out.
    """
    if text.count(b":") > MAX_KEYS:
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
        TooCostly: there are more strings than values are taken.
    """
    structure = text.translate(None, _TEXT)
    if len(structure) > MAX_JSON_DEPTH:
        structure = _outside_strings(text)
    brackets = structure.translate(None, _NOT_BRACKETS)
    opened = brackets.count(b"[") + brackets.count(b"{")
    values = 1 + structure.count(b",") + structure.count(b":") + opened
    return Price(values, opened, _depth(brackets, opened))


def _outside_strings(text: bytes) -> bytes:
    """Return the characters of structure that are no part of a string."""
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in text else text
    # Strings without such characters in them are pairs of quotes now.
    left = plain.translate(None, _TEXT_WITHOUT_QUOTES).replace(b'""', b"")
    if left.count(b'"') > 2 * MAX_JSON_VALUES:
        raise TooCostly(f"more than {MAX_JSON_VALUES} values and keys")
    return _STRING.sub(b"", left)


def _depth(brackets: bytes, opened: int) -> int:
    if opened <= MAX_JSON_DEPTH or opened > MAX_JSON_CONTAINERS:
        return min(opened, MAX_JSON_DEPTH)
    steps = (1 if step else -1 for step in brackets.translate(_STEPS))
    return max(accumulate(steps))
