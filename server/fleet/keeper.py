"""Keeps roles running: starts, watches, restarts and retires their processes."""

import asyncio
import functools
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape

from engine.shared.lifeline import CANNOT_START, CHILD_HEARTBEAT_INTERVAL
from engine.shared.logs import relay_line
from engine.shared.messages import (
    ChildFailed,
    ChildHeartbeat,
    ChildProgress,
    ChildReady,
    ChildStatus,
    MemberKind,
)
from server.fleet.child import Child, Program, ProgramExit, ProgramHandle, Starter

logger = logging.getLogger(__name__)

FIRST_BACKOFF = 0.5
"""Seconds before a process that died is restarted; doubles with each further death."""

MAX_BACKOFF = 30.0
"""Maximum seconds before a process is restarted."""

MAX_SPAWN_BACKOFF = 5.0
"""Maximum seconds between attempts to create a process, which are cheap."""

STABLE_AFTER = 60.0
"""Seconds of uptime after which the restart delay is reset."""


class Restarts:
    """Restart policy of one role.

    Args:
        proven: whether an earlier process of the role was ready.
    """

    def __init__(self, *, proven: bool = False) -> None:
        self._backoff = FIRST_BACKOFF
        self._spawn_backoff = FIRST_BACKOFF
        self._has_died = False
        self._proven = proven

    def wait_after(
        self, lived: float, *, was_ready: bool, is_permanent: bool = False
    ) -> float | None:
        """Return the seconds until the next start, after a process that lived for `lived` seconds.

        None to give up: the role's first process failed to start, so another would too, or the
        failure `is_permanent`, as reported by the process.
        """
        self._spawn_backoff = FIRST_BACKOFF
        is_first = not was_ready and not self._has_died
        if is_first and (is_permanent or not self._proven):
            return None
        self._has_died = True
        if lived > STABLE_AFTER:
            self._backoff = FIRST_BACKOFF
        wait = self._backoff
        self._backoff = min(MAX_BACKOFF, wait * 2)
        return wait

    def wait_after_failed_spawn(self) -> float | None:
        """Return the seconds until the next attempt, after a process could not be created.

        None if the role never had one: then startup fails, so that the operator notices.
        """
        if not self._has_died and not self._proven:
            return None
        wait = self._spawn_backoff
        self._spawn_backoff = min(MAX_SPAWN_BACKOFF, wait * 2)
        return wait


@dataclass(kw_only=True)
class Role:
    """A process to keep running, and the state of its current instance."""

    name: str
    module: str
    launch: Callable[[int], Any]
    """Makes the launch parameters of an incarnation."""
    member: tuple[MemberKind, int] | None = None
    """What to report to the coordinator when the process dies."""
    interpreter: str | None = None
    """Python interpreter; None: the current one."""
    environment: dict[str, str] = field(default_factory=dict)
    inherit: tuple[int, ...] = ()
    start: Starter = Child.start
    """Starts the process, on this node or elsewhere."""
    handle: ProgramHandle | None = None
    keep_task: asyncio.Task[None] | None = None
    """The task that keeps the role running."""
    incarnation: int = 0
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    phase: str = "starting"
    waits_for: str = ""
    """Names of the resources that the process waits for."""
    failure: str | None = None
    last_heartbeat_at: float | None = None
    """Time of the main loop's last reported iteration; None before the first."""
    hangs: bool = False
    """Whether the process is being killed because its main loop stalled."""
    replaced: Counter[str] = field(default_factory=Counter)
    """Earlier processes, by how they ended: "died" or "hung"."""
    restarts: Restarts = field(default_factory=Restarts)


class StartupFailed(Exception):
    """A process of this node cannot start; the message is user-facing."""


@dataclass(eq=False)
class Keeper:
    """Keeps roles running through crashes and hangs."""

    console: Console
    log_format: Literal["text", "json"]
    report_death: Callable[[Role], None]
    prepare: Callable[[], object] = lambda: None
    """Called before each process start; its OSError counts as a failure to create the process."""
    hang_timeout: float = math.inf
    """Seconds without progress of its main loop after which a local process is replaced."""

    def __post_init__(self) -> None:
        self._started_at = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the keeper was created."""
        return time.monotonic() - self._started_at

    def keep(self, role: Role) -> None:
        """Keep a role running until `release` or `retire`."""
        role.keep_task = asyncio.create_task(self._keep_running(role))

    async def until_ready(self, roles: Sequence[Role], *others: asyncio.Future[Any]) -> None:
        """Wait until all roles are ready, or one of the other futures is done.

        Raises:
            StartupFailed: a process exited before it was ready.
        """

        async def all_ready() -> None:
            for role in roles:
                await role.ready.wait()

        ready = asyncio.create_task(all_ready())
        keep_tasks = [role.keep_task for role in roles if role.keep_task is not None]
        waiting: set[asyncio.Future[Any]] = {ready, *others, *keep_tasks}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        for keep_task in keep_tasks:
            if keep_task.done():
                await keep_task  # it ends only by raising StartupFailed

    async def release(self, role: Role) -> None:
        """Stop watching a role; its current process is left running."""
        if role.keep_task is not None:
            role.keep_task.cancel()
            await asyncio.gather(role.keep_task, return_exceptions=True)
            role.keep_task = None

    async def retire(self, role: Role, within: float) -> None:
        """Stop a role: its process gets `within` seconds for an orderly exit."""
        await self.release(role)
        role.ready.clear()
        role.phase, role.waits_for = "retiring", ""
        if role.handle is not None and role.handle.alive:
            role.handle.terminate()
            ending = asyncio.create_task(role.handle.wait())
            await asyncio.wait([ending], timeout=within)
            if role.handle.alive:
                logger.warning("%s did not end within %.0f s: killed", role.name, within)
                role.handle.kill()
            await ending
        self.report_death(role)

    async def _keep_running(self, role: Role) -> None:
        while True:
            try:
                wait = await self._run_once(role)
            except StartupFailed:
                raise
            except Exception:
                logger.exception("%s is restarted: watching it failed", role.name)
                if role.handle is not None and role.handle.alive:
                    role.handle.kill()
                    await role.handle.wait()
                wait = MAX_SPAWN_BACKOFF
            role.ready.clear()
            await asyncio.sleep(wait)

    async def _run_once(self, role: Role) -> float:
        """Run a role's process once; return the seconds until its restart."""
        started = time.monotonic()
        try:
            await self._start(role)
        except (OSError, MemoryError, RuntimeError) as error:  # also no thread to watch it with
            role.phase = "waiting to be started"
            wait = role.restarts.wait_after_failed_spawn()
            if wait is None:
                raise StartupFailed(f"{role.name} cannot be started: {error}") from error
            self._print_restart(
                f"[yellow]{role.name} cannot be started[/]: {escape(str(error) or repr(error))}",
                wait,
            )
            return wait
        assert role.handle is not None
        role.hangs = False
        watching = asyncio.create_task(self._watch(role))
        try:
            end = await role.handle.wait()
        finally:
            watching.cancel()
        role.replaced["hung" if role.hangs else "died"] += 1
        self.report_death(role)
        wait = role.restarts.wait_after(
            time.monotonic() - started,
            was_ready=role.ready.is_set(),
            is_permanent=end.code == CANNOT_START,
        )
        if wait is None:
            raise StartupFailed(self._explain(role, end))
        self._print_restart(f"[yellow]{role.name} {escape(end.description)}[/]", wait)
        return wait

    async def _watch(self, role: Role) -> None:
        """Kill a role's process if its main loop stalls.

        Excludes processes stopped by a signal, and times when this process itself was stalled.
        """
        handle = role.handle
        if not isinstance(handle, Child):
            return
        while True:
            checked_at = time.monotonic()
            await asyncio.sleep(CHILD_HEARTBEAT_INTERVAL)
            now = time.monotonic()
            if role.last_heartbeat_at is None:
                continue
            if now - checked_at > 2 * CHILD_HEARTBEAT_INTERVAL or handle.is_stopped:
                role.last_heartbeat_at = now
            silence = now - role.last_heartbeat_at
            if silence > self.hang_timeout:
                role.hangs = True
                logger.error(
                    "%s hangs: its main loop has made no progress for %.0f s (--hang-timeout); it "
                    "is replaced once it has printed its threads' stacks", role.name, silence,
                )  # fmt: skip
                await handle.end_hung()
                return

    def _print_restart(self, message: str, wait: float) -> None:
        self.console.print(f"{message}; retrying in {wait:.1f} s", highlight=False, soft_wrap=True)

    async def _start(self, role: Role) -> None:
        self.prepare()
        role.incarnation = secrets.randbits(48)
        started_at = time.monotonic()
        role.failure = None
        role.last_heartbeat_at = None
        role.phase, role.waits_for = "starting", ""

        def on_status(status: ChildStatus) -> None:
            match status:
                case ChildProgress(phase, waits_for):
                    if waits_for and waits_for != role.waits_for:
                        logger.warning("%s: %s", role.name, phase)
                    role.phase, role.waits_for = phase, waits_for
                    logger.debug("%s: %s", role.name, phase)
                case ChildReady(detail):
                    role.phase, role.waits_for = "ready", ""
                    role.ready.set()
                    took = time.monotonic() - started_at
                    self.console.print(
                        f"[green]{role.name}[/] ready after {took:.1f} s: {detail}",
                        highlight=False,
                        soft_wrap=True,
                    )
                case ChildHeartbeat():
                    role.last_heartbeat_at = time.monotonic()
                case ChildFailed(reason):
                    role.failure = reason

        program = Program(
            name=role.name,
            module=role.module,
            interpreter=role.interpreter,
            launch=role.launch(role.incarnation),
            environment=role.environment,
            inherit=role.inherit,
            on_status=on_status,
            on_line=functools.partial(relay_line, role.name, self.log_format),
        )
        role.handle = await role.start(program)

    def _explain(self, role: Role, end: ProgramExit) -> str:
        if end.code == CANNOT_START and role.failure is not None:
            return f"{role.name}: {role.failure}"
        assert role.handle is not None
        lines = "\n".join(f"    {line}" for line in role.handle.last_lines)
        return f"{role.name} {end.description} while {role.phase}. Its last output:\n{lines}"
