"""What a front end knows of one engine process, and what that says of it."""

from dataclasses import dataclass, field
from typing import NamedTuple

from engine.shared.image_window import ImageWindow
from engine.shared.messages import AddRequest, EngineEntry, EngineStats
from server.router.load_table import Sent
from server.router.routing import KV_PRESSURE_FROM, EngineLoad

Engine = tuple[int, int]
"""Rank and incarnation of one engine process."""


@dataclass(slots=True, kw_only=True)
class Route:
    """One engine process: what the coordinator says of it, how to reach it, and its traffic.

    `server.router.load` keeps what went there and came back, from `sent` on.
    """

    entry: EngineEntry
    identity: bytes | None = None
    """Its socket's, while it can be reached."""
    heard_at: float = 0.0
    """When its request route was last said to be open."""
    sent: Sent
    stats: EngineStats | None = None
    stats_at: float = 0.0
    outputs: int = 0
    """How many of its messages with outputs have arrived here."""
    behind: "Behind | None" = None
    load: EngineLoad | None = None
    """Its load as of `stats`, `sent` and `cells`, if it was asked for since the first two changed.
    """
    cells: list[bytes] = field(default_factory=list)
    """What neighbours had sent to it then, as the shared table holds it."""
    images: ImageWindow | None = None
    """The images that it has of this front end; None: none were sent yet."""

    @property
    def engine(self) -> Engine:
        return self.entry.rank, self.entry.incarnation

    @property
    def is_open(self) -> bool:
        """Whether it takes requests, if only to keep them while it is halted."""
        return self.identity is not None and self.entry.ready

    @property
    def is_usable(self) -> bool:
        """Whether it runs what it is sent."""
        stats = self.stats
        return self.is_open and not (stats is not None and stats.halted)

    @property
    def takes_images(self) -> bool:
        """Whether requests may show it images."""
        return self.entry.setup is not None and self.entry.setup.images

    def without_held_images(self, message: AddRequest) -> AddRequest:
        """Return what to send it of a request: without images that it has."""
        if not message.encoder_inputs or self.entry.setup is None:
            return message
        if self.images is None:
            self.images = ImageWindow(self.entry.setup.image_window)
        return self.images.without_held(message)

    @property
    def kv_role(self) -> str:
        """What it does of a request, as `EngineSetup` says; empty: all."""
        return "" if self.entry.setup is None else self.entry.setup.kv_role

    @property
    def offers_blocks(self) -> bool:
        """Whether other engines can read KV blocks that it has computed for them."""
        return self.entry.setup is not None and bool(self.entry.setup.kv_address)

    def can_serve(self, message: AddRequest) -> bool:
        """Whether it is able to compute a request."""
        seen = self.takes_images or not message.encoder_inputs
        return seen and (not message.adapter or message.adapter in self.entry.adapters)

    @property
    def hands_over(self) -> bool:
        """Whether it is halted and others are to take its requests."""
        stats = self.stats
        return self.is_open and stats is not None and stats.hands_over

    @property
    def alone(self) -> int:
        """Id of the request that it runs alone; 0 if there is none."""
        stats = self.stats
        return 0 if stats is None else stats.alone

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing to do, as far as its stats are known."""
        stats = self.stats
        return stats is None or stats.running + stats.waiting == 0

    @property
    def num_slots(self) -> int:
        """Sequences that it can run at once."""
        setup, stats = self.entry.setup, self.stats
        configured = 0 if setup is None else setup.max_num_seqs
        if stats is None:
            return configured
        if stats.waiting and stats.kv_usage >= KV_PRESSURE_FROM:
            return stats.running  # memory is what limits it now
        return max(configured, stats.running)


class HeardHello(NamedTuple):
    """Where an engine's request route ends, and which of its connections that is."""

    identity: bytes
    session: int
    at: float
    drains: bool = False
    """Whether it takes nothing new, whatever a coordinator that has just begun says of it."""


class Behind(NamedTuple):
    """What had not arrived, there or here, when that was first noticed."""

    since: float
    requests: int
    outputs: int
