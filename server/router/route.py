"""A front end's state of one engine process."""

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
    """One engine process: the coordinator's entry, its address, and its traffic.

    `server.router.load` maintains the fields from `sent` on.
    """

    entry: EngineEntry
    identity: bytes | None = None
    """Its socket identity, while it is reachable."""
    last_hello_at: float = 0.0
    """Time of its last hello."""
    sent: Sent
    stats: EngineStats | None = None
    stats_at: float = 0.0
    outputs: int = 0
    """Number of its output messages that have arrived."""
    missing: "MissingMessages | None" = None
    load: EngineLoad | None = None
    """Load as of `stats`, `sent` and `cells`; None if not computed since the first two changed."""
    cells: list[bytes] = field(default_factory=list)
    """The neighbours' cells in the shared table at that time."""
    images: ImageWindow | None = None
    """Images that it holds of this front end; None before the first."""

    @property
    def engine(self) -> Engine:
        return self.entry.rank, self.entry.incarnation

    @property
    def is_open(self) -> bool:
        """Whether it accepts requests, even if it is halted and only queues them."""
        return self.identity is not None and self.entry.ready

    @property
    def is_usable(self) -> bool:
        """Whether it runs requests sent to it."""
        stats = self.stats
        return self.is_open and not (stats is not None and stats.halted)

    @property
    def accepts_images(self) -> bool:
        """Whether it accepts requests with images."""
        return self.entry.setup is not None and self.entry.setup.images

    def without_cached_images(self, message: AddRequest) -> AddRequest:
        """Return a request message for it, without the images that it already holds."""
        if not message.encoder_inputs or self.entry.setup is None:
            return message
        if self.images is None:
            self.images = ImageWindow(self.entry.setup.image_window)
        return self.images.omit_held(message)

    @property
    def kv_role(self) -> str:
        """Its role in split requests (see `EngineSetup`); empty if it does everything."""
        return "" if self.entry.setup is None else self.entry.setup.kv_role

    @property
    def offers_blocks(self) -> bool:
        """Whether other engines can read KV blocks that it has computed for them."""
        return self.entry.setup is not None and bool(self.entry.setup.kv_address)

    def can_serve(self, message: AddRequest) -> bool:
        """Return whether it supports a request's images and adapter."""
        received = self.accepts_images or not message.encoder_inputs
        return received and (not message.adapter or message.adapter in self.entry.adapters)

    @property
    def hands_over(self) -> bool:
        """Whether it is halted and its requests are to move to other engines."""
        stats = self.stats
        return self.is_open and stats is not None and stats.hands_over

    @property
    def exclusive_request(self) -> int:
        """Id of the request that it runs alone; 0 if none."""
        stats = self.stats
        return 0 if stats is None else stats.exclusive_request

    @property
    def num_slots(self) -> int:
        """Sequences that it can run at once."""
        setup, stats = self.entry.setup, self.stats
        configured = 0 if setup is None else setup.max_num_seqs
        if stats is None:
            return configured
        if stats.waiting and stats.kv_usage >= KV_PRESSURE_FROM:
            return stats.running  # limited by memory now
        return max(configured, stats.running)


class LastHello(NamedTuple):
    """Socket identity and session of an engine's last hello."""

    identity: bytes
    session: int
    at: float
    drains: bool = False
    """Whether it accepts nothing new, regardless of a restarted coordinator's view."""


class MissingMessages(NamedTuple):
    """Counts of messages missing when that was first noticed."""

    since: float
    requests: int
    outputs: int
