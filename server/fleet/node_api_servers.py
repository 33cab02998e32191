"""API servers on other nodes: one wherever engines are, in places that are kept filled like all."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from server.fleet.keeper import Keeper
from server.fleet.restarts import LONGEST_BACKOFF
from server.fleet.role import Role

logger = logging.getLogger(__name__)

LEAVE_AFTER = 30.0
"""Seconds after which a node without engines needs no API server: longer than a restart takes."""

LOOK_INTERVAL = 0.5
"""Seconds between looks at where engines are."""


class NodeApiServers:
    """Keeps the places of API servers on the nodes of engines.

    Args:
        engines: the places of engines, by rank; read only.
        make_role: makes the place on a node; None: that node needs none.
        drain_within: seconds that an API server gets to end.
    """

    def __init__(
        self,
        keeper: Keeper,
        engines: Mapping[int, Role],
        make_role: Callable[[str], Role | None],
        *,
        drain_within: float,
    ) -> None:
        self.roles: dict[str, Role] = {}
        """By the node's name."""
        self._keeper = keeper
        self._engines = engines
        self._make_role = make_role
        self._drain_within = drain_within
        self._had_engines: dict[str, float] = {}
        """When each node was last seen with engines."""
        self._not_before: dict[str, float] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}

    async def until_ready(self, *others: asyncio.Future[Any]) -> None:
        """Wait until there is one on each node, or one of the other futures is done.

        Raises:
            StartupFailed: one could not start.
        """
        self.look(time.monotonic())
        await self._keeper.until_ready(list(self.roles.values()), *others)

    async def run(self) -> None:
        """Follow the engines for ever."""
        while True:
            self.look(time.monotonic())
            await asyncio.sleep(LOOK_INTERVAL)

    def look(self, now: float) -> None:
        """Fill places on nodes that have got engines, and empty those of nodes without.

        Args:
            now: seconds, monotonic.
        """
        holders = [role.holder for role in self._engines.values() if role.holder is not None]
        for node in {holder.node for holder in holders} - {""}:
            self._had_engines[node] = now
            if node not in self.roles and now >= self._not_before.get(node, now):
                self._fill(node)
        for node, role in list(self.roles.items()):
            if node in self._leaving:
                continue
            if role.keeping is not None and role.keeping.done():
                self._failed(node, role.keeping, now)
            elif now - self._had_engines[node] > LEAVE_AFTER:
                self._leaving[node] = asyncio.create_task(self._leave(node, role))

    def _fill(self, node: str) -> None:
        role = self._make_role(node)
        if role is not None:
            self.roles[node] = role
            self._keeper.fill(role)

    def _failed(self, node: str, keeping: asyncio.Task[None], now: float) -> None:
        """Try again later: on a node that has joined since, this ends nothing else."""
        reason = None if keeping.cancelled() else keeping.exception()
        logger.error("%s; again in %.0f s", reason, LONGEST_BACKOFF)
        self._not_before[node] = now + LONGEST_BACKOFF
        del self.roles[node]

    async def _leave(self, node: str, role: Role) -> None:
        try:
            await self._keeper.retire(role, self._drain_within)
        finally:
            del self.roles[node], self._leaving[node]
