"""Parts of large answers as JSON before the rest is made, so that never all of it is objects."""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TypeVar, cast

import msgspec

T = TypeVar("T")
S = TypeVar("S")

_encode = msgspec.json.Encoder().encode
_AT_ONCE = 256


def encoded_list(items: Iterable[T]) -> list[T]:
    """Return what encodes to the list of these items, which are made and dropped in parts."""
    parts, rest = [], iter(items)
    while part := list(islice(rest, _AT_ONCE)):
        parts.append(_encode(part)[1:-1])
    return cast("list[T]", msgspec.Raw(b"[" + b",".join(parts) + b"]"))


def encoded_each(items: Sequence[T], show: Callable[[int, T], S]) -> list[S]:
    """Return what encodes to what `show` makes of each item, given with its index."""
    shown = [msgspec.Raw(_encode(show(index, item))) for index, item in enumerate(items)]
    return cast("list[S]", shown)
