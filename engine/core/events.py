"""Events of an engine's core, and the inbox of its loop, which the receiver fills."""

from dataclasses import dataclass
from queue import Empty, SimpleQueue

from engine.shared.messages import ApplyAdapterTable, CoreInput, FleetOrder, FormGroup, StartDpWave


@dataclass(frozen=True)
class FrontEndJoined:
    """A front end is connected; requests can follow. A new incarnation replaces the old one."""

    index: int
    incarnation: int


@dataclass(frozen=True)
class FrontEndLeft:
    """A front end has left: its requests are obsolete."""

    index: int


@dataclass(frozen=True)
class Rejoined:
    """The engine has registered again with a restarted coordinator, which knows this wave."""

    wave: int


@dataclass(frozen=True)
class PrerequisitesSettled:
    """Grammars, or KV blocks from a tier, that requests wait for are available or have failed."""


@dataclass(frozen=True)
class AdaptersSettled:
    """Adapters have been loaded, or failed to load, since the last such event."""


CoreEvent = (
    CoreInput | FrontEndJoined | FrontEndLeft | PrerequisitesSettled | AdaptersSettled | StartDpWave
    | ApplyAdapterTable | FleetOrder | Rejoined
)  # fmt: skip


@dataclass(frozen=True)
class Welcomed:
    """The engine is a member and knows its rank."""

    rank: int
    wave: int


@dataclass(frozen=True)
class Drain:
    """The engine has to finish its requests, then exit."""


@dataclass(frozen=True)
class Stop:
    """The engine has to exit; `error` is the reason if it is a failure."""

    error: str | None = None


InboxItem = CoreEvent | Welcomed | FormGroup | Drain | Stop


def receive(inbox: "SimpleQueue[InboxItem]", within: float) -> list[InboxItem]:
    """Wait up to `within` seconds; return all items in the inbox, in order.

    The caller has to be the inbox's only consumer.
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
