"""Keeps places filled: starts a process, follows it, restarts it when it dies, retires it."""

import asyncio
import functools
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape

from engine.shared.lifeline import CANNOT_START
from engine.shared.logs import relay_line
from engine.shared.messages import ChildFailed, ChildProgress, ChildReady, ChildStatus
from server.fleet.holder import Ended, Program
from server.fleet.restarts import LONGEST_SPAWN_BACKOFF
from server.fleet.role import Role

logger = logging.getLogger(__name__)


class StartupFailed(Exception):
    """A process of this node cannot start; the message is for people."""


class Keeper:
    """Fills places with processes, whatever happens to them."""

    def __init__(
        self,
        console: Console,
        log_format: Literal["text", "json"],
        report_death: Callable[[Role], None],
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        """Make a keeper that calls `prepare` before it starts a process.

        `prepare` may raise an OSError, which counts as a process that cannot be started.
        """
        self._prepare = prepare
        self._console = console
        self._log_format = log_format
        self._report_death = report_death
        self._started_at = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the keeper began."""
        return time.monotonic() - self._started_at

    def fill(self, role: Role) -> None:
        """Start filling a place, until `release` or `retire`."""
        role.keeping = asyncio.create_task(self._keep(role))

    async def until_ready(self, roles: Sequence[Role], *others: asyncio.Future[Any]) -> None:
        """Wait until all of the places are filled, or one of the other futures is done.

        Raises:
            StartupFailed: a process ended before it was ready.
        """

        async def all_ready() -> None:
            for role in roles:
                await role.ready.wait()

        ready = asyncio.create_task(all_ready())
        keepers = [role.keeping for role in roles if role.keeping is not None]
        waiting: set[asyncio.Future[Any]] = {ready, *others, *keepers}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        for keeper in keepers:
            if keeper.done():
                await keeper  # a keeper ends only by raising StartupFailed

    async def release(self, role: Role) -> None:
        """Stop filling a place; its present holder is left alone."""
        if role.keeping is not None:
            role.keeping.cancel()
            await asyncio.gather(role.keeping, return_exceptions=True)
            role.keeping = None

    async def retire(self, role: Role, within: float) -> None:
        """Empty a place: its holder has this many seconds to end by itself."""
        await self.release(role)
        role.ready.clear()
        role.phase, role.waits_for = "retiring", ""
        if role.holder is not None and role.holder.alive:
            role.holder.terminate()
            ending = asyncio.create_task(role.holder.wait())
            await asyncio.wait([ending], timeout=within)
            if role.holder.alive:
                logger.warning("%s did not end within %.0f s: killed", role.name, within)
                role.holder.kill()
            await ending
        self._report_death(role)

    async def _keep(self, role: Role) -> None:
        """Keep a place filled until told otherwise.

        Raises:
            StartupFailed: its first holder could not start.
        """
        while True:
            try:
                wait = await self._hold(role)
            except StartupFailed:
                raise
            except Exception:
                logger.exception("%s is started again: its place could not be watched", role.name)
                await self._abandon(role)
                wait = LONGEST_SPAWN_BACKOFF
            role.ready.clear()
            await asyncio.sleep(wait)

    async def _hold(self, role: Role) -> float:
        """Fill a place once; return the seconds until it has to be filled again.

        Raises:
            StartupFailed: its first holder could not start.
        """
        started = time.monotonic()
        try:
            await self._start(role)
        except (OSError, MemoryError, RuntimeError) as error:  # also no thread to watch it with
            role.phase = "waiting to be started"
            wait = role.restarts.wait_after_failed_spawn()
            if wait is None:
                raise StartupFailed(f"{role.name} cannot be started: {error}") from error
            self._tell(
                f"[yellow]{role.name} cannot be started[/]: {escape(str(error) or repr(error))}",
                wait,
            )
            return wait
        assert role.holder is not None
        end = await role.holder.wait()
        self._report_death(role)
        wait = role.restarts.wait_after(
            time.monotonic() - started,
            was_ready=role.ready.is_set(),
            hopeless=end.code == CANNOT_START,
        )
        if wait is None:
            raise StartupFailed(self._explain(role, end))
        self._tell(f"[yellow]{role.name} {escape(end.how)}[/]", wait)
        return wait

    def _tell(self, what: str, wait: float) -> None:
        self._console.print(f"{what}; again in {wait:.1f} s", highlight=False, soft_wrap=True)

    async def _abandon(self, role: Role) -> None:
        if role.holder is not None and role.holder.alive:
            role.holder.kill()
            await role.holder.wait()

    async def _start(self, role: Role) -> None:
        self._prepare()
        role.incarnation = secrets.randbits(48)
        role.failure = None
        role.phase, role.waits_for = "starting", ""

        def on_status(status: ChildStatus) -> None:
            match status:
                case ChildProgress(phase, waits_for):
                    role.phase, role.waits_for = phase, waits_for
                    logger.debug("%s: %s", role.name, phase)
                case ChildReady(detail):
                    role.phase, role.waits_for = "ready", ""
                    role.ready.set()
                    self._console.print(
                        f"[green]{role.name}[/] ready after {self.elapsed:.1f} s: {detail}",
                        highlight=False,
                        soft_wrap=True,
                    )
                case ChildFailed(reason):
                    role.failure = reason

        program = Program(
            name=role.name,
            module=role.module,
            launch=role.launch(role.incarnation),
            environment=role.environment,
            inherit=role.inherit,
        )
        role.holder = await role.start(
            program,
            on_status=on_status,
            on_line=functools.partial(relay_line, role.name, self._log_format),
        )

    def _explain(self, role: Role, end: Ended) -> str:
        if end.code == CANNOT_START and role.failure is not None:
            return f"{role.name}: {role.failure}"
        assert role.holder is not None
        lines = "\n".join(f"    {line}" for line in role.holder.last_lines)
        return f"{role.name} {end.how} while {role.phase}. Its last words:\n{lines}"
