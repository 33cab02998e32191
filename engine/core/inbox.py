"""What the receiver puts into the inbox of an engine's loop, and how the loop waits for it."""

from dataclasses import dataclass
from queue import Empty, SimpleQueue

from engine.core.events import CoreEvent
from engine.shared.messages import FormGroup


@dataclass(frozen=True)
class Welcomed:
    """The engine is a member and knows its rank."""

    rank: int
    wave: int


@dataclass(frozen=True)
class Drain:
    """The engine has to finish what it has, then end."""


@dataclass(frozen=True)
class Stop:
    """The engine has to end, for this reason if it is an error."""

    error: str | None = None


InboxItem = CoreEvent | Welcomed | FormGroup | Drain | Stop


def receive(inbox: "SimpleQueue[InboxItem]", within: float) -> list[InboxItem]:
    """Wait for at most `within` seconds; return everything that has come, in order.

    No other thread may take from the inbox.
    """
    items: list[InboxItem] = []
    if within > 0 and inbox.empty():
        try:
            items.append(inbox.get(timeout=within))
        except Empty:
            return items
    while not inbox.empty():  # cheaper than an exception in every step
        items.append(inbox.get_nowait())
    return items
