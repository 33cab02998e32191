"""What an engine's core is told, and the inbox of its loop, which the receiver fills."""

from dataclasses import dataclass
from queue import Empty, SimpleQueue

from engine.shared.messages import CoreInput, FleetOrder, FormGroup, HoldAdapters, StartDpWave


@dataclass(frozen=True)
class FrontEndJoined:
    """A front end is connected; its requests may follow. A new incarnation replaces the old one."""

    index: int
    incarnation: int


@dataclass(frozen=True)
class FrontEndLeft:
    """A front end has gone: its requests are obsolete."""

    index: int


@dataclass(frozen=True)
class Rejoined:
    """A restarted coordinator knows the engine again, and of this wave."""

    wave: int


@dataclass(frozen=True)
class PrerequisitesSettled:
    """What requests wait for is there, or cannot be had: grammars, or KV blocks from a tier."""


@dataclass(frozen=True)
class AdaptersSettled:
    """Adapters have been read, or could not be, since the message before."""


CoreEvent = (
    CoreInput | FrontEndJoined | FrontEndLeft | PrerequisitesSettled | AdaptersSettled | StartDpWave
    | HoldAdapters | FleetOrder | Rejoined
)  # fmt: skip


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
