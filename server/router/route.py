"""What a front end knows of one engine process, and what that says of it."""

from dataclasses import dataclass
from typing import NamedTuple

from engine.shared.messages import EngineEntry, EngineStats
from server.router.load_table import NOTHING, Sent
from server.router.routing import KV_PRESSURE_FROM, EngineLoad


@dataclass
class Route:
    """One engine process: how to reach it and what has been sent there."""

    entry: EngineEntry
    identity: bytes | None = None
    stats: EngineStats | None = None
    stats_at: float = 0.0
    heard_at: float = 0.0
    """When the engine itself was last heard on one of its two connections to this front end."""
    sent: Sent = NOTHING
    outputs: int = 0
    """How many of its messages with outputs have arrived here."""
    behind: "Behind | None" = None
    load: EngineLoad | None = None
    """Its load as of `stats` and `sent`, if it was asked for since they changed."""


class HeardHello(NamedTuple):
    """Where an engine's request route ends, and which of its connections that is."""

    identity: bytes
    session: int
    at: float


class Behind(NamedTuple):
    """What had not arrived, there or here, when that was first noticed."""

    since: float
    requests: int
    outputs: int


def is_open(route: Route) -> bool:
    """Whether an engine takes requests, if only to keep them while it is halted."""
    return route.entry.ready and route.identity is not None


def is_usable(route: Route) -> bool:
    """Whether an engine runs what it is sent."""
    halted = route.stats is not None and route.stats.halted
    return is_open(route) and not halted


def alone_on(route: Route) -> int:
    """Return the id of the request that an engine runs alone; 0 if there is none."""
    return 0 if route.stats is None else route.stats.alone


def slots_of(route: Route) -> int:
    """Return how many sequences an engine can run at once."""
    setup, stats = route.entry.setup, route.stats
    configured = 0 if setup is None else setup.max_num_seqs
    if stats is None:
        return configured
    if stats.waiting and stats.kv_usage >= KV_PRESSURE_FROM:
        return stats.running  # memory is what limits it now
    return max(configured, stats.running)


def is_idle(stats: EngineStats | None) -> bool:
    """Whether an engine has nothing to do, as far as its stats are known."""
    return stats is None or stats.running + stats.waiting == 0
