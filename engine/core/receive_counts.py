"""Which front ends an engine has, and how much came from and went to each."""

from dataclasses import dataclass
from typing import NamedTuple

from engine.shared.messages import AddRequest, Received


@dataclass(slots=True)
class _FrontEnd:
    """One front-end process, and what was received from it."""

    incarnation: int
    present: bool = True
    requests: int = 0
    prompt_tokens: int = 0
    outputs: int = 0


class News(NamedTuple):
    """What all front ends have to know at once when it changes: fields of the stats."""

    halted: bool = False
    hands_over: bool = False
    alone: int = 0


class FrontEndCounts:
    """All front ends that an engine has met, by index.

    Counts of a front end that left stay: the same process may turn out to be alive, and counts
    only grow.
    """

    def __init__(self) -> None:
        self.told = News()
        """What all front ends know."""
        self._entries: dict[int, _FrontEnd] = {}

    @property
    def any_present(self) -> bool:
        """Whether anybody is there who could send requests."""
        return any(entry.present for entry in self._entries.values())

    def joined(self, index: int, incarnation: int) -> bool:
        """Note that a front end is there; return whether it replaces an earlier process."""
        known = self._entries.get(index)
        if known is not None and known.incarnation == incarnation:
            known.present = True
            return False
        self._entries[index] = _FrontEnd(incarnation)
        return known is not None

    def left(self, index: int) -> bool:
        """Note that a front end is gone; return whether it was ever there."""
        known = self._entries.get(index)
        if known is None:
            return False
        known.present = False
        return True

    def to_tell(self, news: News) -> list[int]:
        """Return the front ends that have to be told of a change now: all, if there is one."""
        if news == self.told:
            return []
        self.told = news
        return [index for index, entry in self._entries.items() if entry.present]

    def is_present(self, index: int) -> bool:
        """Return whether a front end is there to take answers."""
        entry = self._entries.get(index)
        return entry is not None and entry.present

    def count_request(self, message: AddRequest) -> None:
        """Count a request of a front end that is there."""
        entry = self._entries[message.front_end]
        entry.requests += 1
        entry.prompt_tokens += message.num_tokens

    def count_outputs(self, index: int) -> None:
        """Count a message with outputs for a front end."""
        self._entries[index].outputs += 1

    def received(self) -> list[Received]:
        """Return the counts of those that are there."""
        return [
            Received(index, entry.incarnation, entry.requests, entry.prompt_tokens, entry.outputs)
            for index, entry in self._entries.items()
            if entry.present
        ]
