"""Adapters: which there are in the cluster, and which of them an engine has."""

from typing import Literal

import msgspec

from engine.shared.messages.wire import Message

AdapterState = Literal["loading", "serving", "leaving"]


class AdapterEntry(msgspec.Struct, frozen=True, array_like=True):
    """One adapter of the cluster, under one name: if it is loaded again, that is another entry."""

    serial: int
    """Tells entries apart; later ones have larger numbers."""
    name: str
    path: str
    """Of its directory, as engines see it."""
    version: str = ""
    """Digest of its content; empty before an engine has read it."""
    state: AdapterState = "loading"
    """loading: engines read it; serving: requests may name it; leaving: requests that have begun
    with it may go on."""
    confined: bool = True
    """Whether it has to lie below the engines' --lora-dir."""
    ticket: int = 0
    """A random number of whoever asked for it; 0 for adapters of the settings."""


class AdapterSheet(msgspec.Struct, frozen=True, array_like=True):
    """All adapters of a cluster; `revision` grows with every change."""

    revision: int
    entries: list[AdapterEntry] = []

    @property
    def serving(self) -> dict[str, AdapterEntry]:
        """Those that requests may name, by name."""
        return {entry.name: entry for entry in self.entries if entry.state == "serving"}


class HeldAdapter(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of loading one entry in one engine."""

    serial: int
    version: str = ""
    error: str = ""
    """Why the engine does not have it."""


class AdapterOutcome(msgspec.Struct, frozen=True, array_like=True):
    """How a wish ended."""

    ticket: int
    status: int
    """An HTTP status: 200 once all front ends know that it is done."""
    reason: str = ""


class AdaptersView(msgspec.Struct, frozen=True, array_like=True):
    """What front ends are told of adapters."""

    sheet: AdapterSheet
    outcomes: list[AdapterOutcome] = []
    """Of the newest wishes."""


class AdapterWish(Message, frozen=True):
    """A front end's operator wants an adapter to be loaded, or unloaded if there is no path.

    Repeated until the view has its outcome.
    """

    ticket: int
    name: str
    path: str | None = None
    in_place: bool = False
    """Whether it may replace another one of the same name."""
    group: str = ""


class AdaptersInUse(Message, frozen=True):
    """A front end accepts requests by the sheet of this revision.

    `versions` are those with which it has requests that have not ended.
    """

    front_end: int
    incarnation: int
    revision: int
    versions: list[str] = []
    group: str = ""


class AdapterLoad(msgspec.Struct, frozen=True, array_like=True):
    """The adapters that an engine's steps use, by version."""

    resident: list[str] = []
    """In slots."""
    running: list[str] = []
    """In slots, with sequences that use them."""
    waiting: list[str] = []
    """With sequences that wait."""
