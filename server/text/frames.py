"""The special tokens that a tokenizer puts around a text, or around the two texts of a pair.

They are found by tokenizing probes, so that texts can be cut to a length before they are framed,
and the texts of many pairs be tokenized once.
"""

from typing import Self

import msgspec
from tokenizers import Tokenizer

_PROBES = ("a", "b")


class Frame(msgspec.Struct, frozen=True):
    """What stands before a text, between it and a second one, and at the end."""

    before: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    types_from_second: bool = False
    """Whether tokens from the second text on are of another type than those before."""

    @property
    def size(self) -> int:
        """How many tokens they are."""
        return len(self.before) + len(self.between) + len(self.after)

    def around(self, first: list[int], second: list[int] | None = None) -> list[int]:
        """Return a text's tokens, or those of two, with the special ones."""
        tokens = [*self.before, *first]
        if second is not None:
            tokens += [*self.between, *second]
        return [*tokens, *self.after]

    def second_from(self, first: list[int]) -> int:
        """Return where the tokens of the second type begin; 0 if there are none."""
        if not self.types_from_second:
            return 0
        return len(self.before) + len(first) + len(self.between)


class Frames(msgspec.Struct, frozen=True):
    """The special tokens of one tokenizer."""

    single: Frame
    pair: Frame

    @classmethod
    def of(cls, backend: Tokenizer) -> Self:
        """Find them; a tokenizer that frames in a way that is not understood adds none."""
        first, second = (backend.encode(text, add_special_tokens=False).ids for text in _PROBES)
        alone = backend.encode(_PROBES[0])
        at = _find(alone.ids, first, 0)
        single = Frame()
        if first and at is not None:
            single = Frame(tuple(alone.ids[:at]), (), tuple(alone.ids[at + len(first) :]))
        pair = backend.encode(*_PROBES)
        begin = _find(pair.ids, first, 0)
        after = None if begin is None else _find(pair.ids, second, begin + len(first))
        if not first or not second or begin is None or after is None:
            return cls(single, Frame())
        return cls(
            single,
            Frame(
                tuple(pair.ids[:begin]),
                tuple(pair.ids[begin + len(first) : after]),
                tuple(pair.ids[after + len(second) :]),
                types_from_second=pair.type_ids[after] == 1,
            ),
        )


def _find(ids: list[int], part: list[int], start: int) -> int | None:
    places = range(start, len(ids) - len(part) + 1)
    return next((at for at in places if ids[at : at + len(part)] == part), None)
