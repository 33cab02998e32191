"""Scaling of a node's engines, and of API servers on engines' nodes, while serving.

Engines are added by starting another role and removed by retiring the highest ranks: an engine that
is asked to exit first notifies the coordinator, so that nothing new is routed to it, and exits when
its requests are finished. Changes run one after the other; the newest request wins.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from engine.shared.messages import (
    ControlQuery,
    ControlRequest,
    ControlStatus,
    RestartEngines,
    ScaleEngines,
)
from server.fleet.keeper import MAX_BACKOFF, Keeper, Restarts, Role, StartupFailed
from server.router.load_table import MAX_ENGINES

logger = logging.getLogger(__name__)

IDLE_NODE_TIMEOUT = 30.0
"""Seconds without engines after which a node's API server is stopped: longer than a restart."""

POLL_INTERVAL = 0.5
"""Seconds between checks of the engines' nodes."""

REPLACEMENT_DIVISOR = 16
"""One engine in 16, and at least one, is replaced at a time, so that the others keep serving."""


@dataclass(eq=False)
class EngineScaler:
    """Adds or removes engines of a node to match the requested number; replaces them on demand."""

    keeper: Keeper
    engines: dict[int, Role]
    """The running roles, by rank; kept up to date."""
    make_role: Callable[[int], Role]
    _: KW_ONLY
    retire_within: float
    """Seconds for a retiring engine to exit."""
    start_within: float
    """Seconds for a new engine to become ready."""
    is_single: bool = False
    """Whether there cannot be a second engine."""

    def __post_init__(self) -> None:
        self._target = len(self.engines)
        self._restart_requested = False
        self._target_changed = asyncio.Event()
        self._newer_target = asyncio.Event()
        """Set and replaced with each request."""
        self._busy = False
        self._error: str | None = None

    def handle(self, request: ControlRequest) -> ControlStatus:
        """Record a request; return the state without waiting."""
        match request:
            case ScaleEngines(size) if not 1 <= size <= MAX_ENGINES:
                return self._status(f"there can be 1 to {MAX_ENGINES} engines, not {size}")
            case ScaleEngines(size) if self.is_single and size > 1:
                return self._status("an engine that spans nodes (--nnodes) cannot be scaled")
            case ScaleEngines(size):
                self._target = size
            case RestartEngines():
                self._restart_requested = True
            case ControlQuery():
                return self.status
        self._start_change()
        return self._status(None)

    def assign(self, target: int, *, restart: bool) -> None:
        """Apply the cluster-wide decision: run `target` engines (0 is allowed), or replace each."""
        self._target = target
        self._restart_requested |= restart
        self._start_change()

    def _start_change(self) -> None:
        self._error = None
        self._busy = True
        self._target_changed.set()
        self._newer_target.set()
        self._newer_target = asyncio.Event()

    @property
    def status(self) -> ControlStatus:
        """The current state of the engines."""
        return self._status(self._error)

    def _status(self, error: str | None) -> ControlStatus:
        status = ControlStatus(self._target, {}, self._busy, error, hosts={}, waiting={})
        for rank, role in sorted(self.engines.items()):
            status.engines[str(rank)] = role.phase
            if role.handle is not None and role.handle.node:
                status.hosts[str(rank)] = role.handle.node
            if role.waits_for:
                status.waiting[str(rank)] = role.waits_for
        return status

    async def run(self) -> None:
        """Apply requests until cancelled."""
        while True:
            await self._target_changed.wait()
            self._target_changed.clear()
            try:
                target = self._target
                missing = [rank for rank in range(target) if rank not in self.engines]
                surplus = sorted(rank for rank in self.engines if rank >= target)
                await _all_of(self._add(rank, resizing=True) for rank in missing)
                await _all_of(self._retire(rank) for rank in surplus)
                if self._restart_requested:
                    self._restart_requested = False
                    await self._replace_all()
            except (StartupFailed, TimeoutError) as error:
                self._fail(str(error) or "an engine was not ready in time")
            except Exception as error:
                logger.exception("scaling failed")
                self._fail(f"scaling failed: {error!r}")
            self._busy = self._target_changed.is_set()

    def _fail(self, reason: str) -> None:
        self._error = reason
        logger.error("scaling: %s", reason)
        self._target = len(self.engines)

    async def _replace_all(self) -> None:
        ranks = sorted(self.engines)
        spare = ranks[-1] + 1 if len(ranks) == 1 and not self.is_single else None
        if spare is not None:
            await self._add(spare)  # serves while the only engine is replaced
        # The first alone: if its successor cannot start, the others keep running.
        at_once = max(1, len(ranks) // REPLACEMENT_DIVISOR)
        batches = [ranks[first : first + at_once] for first in range(1, len(ranks), at_once)]
        for batch in [ranks[:1], *batches]:
            await _all_of(self._replace(rank) for rank in batch)
        if spare is not None:
            await self._retire(spare)

    async def _replace(self, rank: int) -> None:
        await self._retire(rank)
        await self._add(rank, proven=True)

    async def _add(self, rank: int, *, proven: bool = False, resizing: bool = False) -> None:
        role = self.make_role(rank)
        role.restarts = Restarts(proven=proven)
        self.engines[rank] = role
        self.keeper.keep(role)
        try:
            async with asyncio.timeout(self.start_within):
                if resizing:
                    await self._ready_or_surplus(rank, role)
                else:
                    await self.keeper.until_ready([role])
        except StartupFailed:
            await self._retire(rank)
            raise
        except TimeoutError:
            if not proven:  # a proven role is kept, since it will start eventually
                await self._retire(rank)
            raise
        if resizing and rank >= self._target and not role.ready.is_set():
            await self._retire(rank)

    async def _ready_or_surplus(self, rank: int, role: Role) -> None:
        """Wait for a new engine, whose machine may not exist yet.

        A newer request for fewer engines ends the wait.
        """
        while rank < self._target and not role.ready.is_set():
            newer = asyncio.create_task(self._newer_target.wait())
            try:
                await self.keeper.until_ready([role], newer)
            finally:
                newer.cancel()

    async def _retire(self, rank: int) -> None:
        await self.keeper.retire(self.engines[rank], self.retire_within)
        del self.engines[rank]


async def _all_of(changes: Iterable[Coroutine[Any, Any, None]]) -> None:
    for result in await asyncio.gather(*changes, return_exceptions=True):
        if result is not None:
            raise result


@dataclass(eq=False)
class NodeApiServers:
    """Keeps an API server on each node that has engines."""

    keeper: Keeper
    engines: Mapping[int, Role]
    """The engines' roles, by rank; read only."""
    make_role: Callable[[str], Role | None]
    """Makes the role on a node; None if the node needs no API server."""
    _: KW_ONLY
    drain_within: float
    """Seconds for an API server to exit."""

    def __post_init__(self) -> None:
        self.roles: dict[str, Role] = {}
        """By node name."""
        self._last_engine_at: dict[str, float] = {}
        """When each node was last seen with engines."""
        self._retry_at: dict[str, float] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}

    async def until_ready(self, *others: asyncio.Future[Any]) -> None:
        """Wait until each node has a ready API server, or one of the other futures is done.

        Raises:
            StartupFailed: a server could not start.
        """
        self.update(time.monotonic())
        await self.keeper.until_ready(list(self.roles.values()), *others)

    async def run(self) -> None:
        """Follow the engines until cancelled."""
        while True:
            self.update(time.monotonic())
            await asyncio.sleep(POLL_INTERVAL)

    def update(self, now: float) -> None:
        """Start API servers on nodes that gained engines, and stop those on nodes without."""
        handles = [role.handle for role in self.engines.values() if role.handle is not None]
        for node in {handle.node for handle in handles} - {""}:
            self._last_engine_at[node] = now
            if node not in self.roles and now >= self._retry_at.get(node, now):
                role = self.make_role(node)
                if role is not None:
                    self.roles[node] = role
                    self.keeper.keep(role)
        for node, server in list(self.roles.items()):
            if node in self._leaving:
                continue
            keep_task = server.keep_task
            if keep_task is not None and keep_task.done():
                # Retry later: on a node that joined after the start, a failure does not end the
                # stack.
                reason = None if keep_task.cancelled() else keep_task.exception()
                logger.error("%s; retrying in %.0f s", reason, MAX_BACKOFF)
                self._retry_at[node] = now + MAX_BACKOFF
                del self.roles[node]
            elif now - self._last_engine_at[node] > IDLE_NODE_TIMEOUT:
                self._leaving[node] = asyncio.create_task(self._remove(node, server))

    async def _remove(self, node: str, role: Role) -> None:
        try:
            await self.keeper.retire(role, self.drain_within)
        finally:
            del self.roles[node], self._leaving[node]
