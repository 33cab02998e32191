"""Adapters of the cluster, and the states of these on an engine."""

from typing import Literal

import msgspec

from engine.shared.messages.wire import Message

AdapterState = Literal["loading", "serving", "leaving"]


class AdapterEntry(msgspec.Struct, frozen=True, array_like=True):
    """One adapter under one name; loading it again creates a new entry."""

    serial: int
    """Unique id; grows with every entry."""
    name: str
    path: str
    """Path of its directory on the engines."""
    version: str = ""
    """Digest of its content; empty until an engine has read it."""
    state: AdapterState = "loading"
    """loading: engines read it; serving: requests can name it; leaving: only requests that already
    use it continue."""
    confined: bool = True
    """Whether it has to be inside the engines' --lora-dir."""
    ticket: int = 0
    """Random number of the load request; 0 for adapters from the settings."""


class AdapterTable(msgspec.Struct, frozen=True, array_like=True):
    """All adapters of a cluster; `revision` grows with every change."""

    revision: int
    entries: list[AdapterEntry] = []

    @property
    def serving(self) -> dict[str, AdapterEntry]:
        """Adapters that requests can name, by name."""
        return {entry.name: entry for entry in self.entries if entry.state == "serving"}


class AdapterLoadResult(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of loading one entry in one engine."""

    serial: int
    version: str = ""
    error: str = ""
    """Why loading failed."""


class AdapterOutcome(msgspec.Struct, frozen=True, array_like=True):
    """Outcome of a load or unload request."""

    ticket: int
    status: int
    """HTTP status: 200 once all front ends know the result."""
    reason: str = ""


class AdaptersView(msgspec.Struct, frozen=True, array_like=True):
    """State of the adapters as published to front ends."""

    table: AdapterTable
    outcomes: list[AdapterOutcome] = []
    """Of the newest requests."""


class AdapterRequest(Message, frozen=True, tag="AdapterWish"):
    """An operator's request, through a front end, to load an adapter, or to unload it if no path.

    Repeated until the view contains its outcome.
    """

    ticket: int
    name: str
    path: str | None = None
    in_place: bool = False
    """Whether to replace a loaded adapter of the same name."""
    group: str = ""


class AdaptersInUse(Message, frozen=True):
    """A front end has applied the table of this revision.

    `versions` are those used by its unfinished requests.
    """

    front_end: int
    incarnation: int
    revision: int
    versions: list[str] = []
    group: str = ""


class AdapterLoad(msgspec.Struct, frozen=True, array_like=True):
    """Adapter versions in use by an engine's steps."""

    resident: list[str] = []
    """Loaded in slots."""
    running: list[str] = []
    """Loaded in slots and used by running sequences."""
    waiting: list[str] = []
    """Required by waiting sequences."""
