"""The parent of a node's processes: start order, readiness, death, restart and stop (policy)."""

import asyncio
import contextlib
import functools
import logging
import secrets
import shutil
import signal
import socket
import time
from typing import Any

import msgspec
import zmq
from rich.console import Console

from engine.config import private_directory
from engine.lifeline import CANNOT_START
from engine.logs import LogLines, relay_line
from engine.messages import (
    ChildFailed,
    ChildProgress,
    ChildReady,
    ChildStatus,
    Goodbye,
    encode,
)
from engine.transport import Transport
from server.child import Child
from server.config import ServeConfig
from server.role import FIRST_BACKOFF, Role, coordinator_role, member_roles

logger = logging.getLogger(__name__)

STOP_TIMEOUT = 1.0
"""Seconds that a child gets to end, beyond what it was promised, before it is killed."""

LONGEST_BACKOFF = 30.0
"""Most seconds before a child that keeps dying is started again."""

STABLE_AFTER = 60.0
"""Seconds of life after which a child's earlier deaths are forgiven."""


class StartupFailed(Exception):
    """A process of this node cannot start; the message is for people."""


class Supervisor:
    """Starts a coordinator, engines and front ends, and keeps each place filled."""

    def __init__(self, config: ServeConfig, console: Console) -> None:
        self._console = console
        self._own_directory = config.cluster.socket_dir is None
        self._directory = private_directory(config.cluster.socket_dir)
        cluster = msgspec.structs.replace(
            config.cluster,
            coordinator=f"ipc://{self._directory}/coordinator",
            socket_dir=str(self._directory),
        )
        self._config = msgspec.structs.replace(config, cluster=cluster)
        self._listener: socket.socket | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._registration: zmq.Socket[bytes] | None = None
        self._keepers: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._started_at = time.monotonic()

    # -- life ------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Serve until a signal; return the exit code."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal)
        roles: list[Role] = []
        try:
            self._listener = self._listen()
            coordinator = coordinator_role(self._config)
            others = member_roles(self._config, self._directory, self._listener.fileno())
            roles = [coordinator, *others]
            await self._start_all(coordinator, others)
            if not self._stop.is_set():
                self._announce()
            await self._stop.wait()
            self._console.print("stopping")
            return 0
        except StartupFailed as error:
            self._console.print(
                f"[bold red]swell cannot start:[/] {error}", highlight=False, soft_wrap=True
            )
            return 1
        finally:
            for keeper in self._keepers:
                keeper.cancel()
            await asyncio.gather(*self._keepers, return_exceptions=True)
            await self._stop_all(roles)
            self._clean_up()

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._force.set()
        self._stop.set()

    def _listen(self) -> socket.socket:
        http = self._config.http
        family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((http.host, http.port))
        except OSError as error:
            listener.close()
            raise StartupFailed(
                f"cannot listen on {http.host}:{http.port}: {error.strerror}. "
                "Is something else running there? Choose another --port."
            ) from error
        listener.listen(2048)
        listener.setblocking(False)
        listener.set_inheritable(True)
        return listener

    # -- starting --------------------------------------------------------------------------------

    async def _start_all(self, coordinator: Role, others: list[Role]) -> None:
        timeout = self._config.supervisor.startup_timeout
        try:
            async with asyncio.timeout(timeout):
                for group in ([coordinator], others):
                    self._keepers += [asyncio.create_task(self._keep(role)) for role in group]
                    await self._until_ready(group)
        except TimeoutError:
            late = [role for role in [coordinator, *others] if not role.ready.is_set()]
            names = ", ".join(f"{role.name} ({role.phase})" for role in late)
            raise StartupFailed(f"not ready within {timeout:.0f} s: {names}") from None

    async def _until_ready(self, group: list[Role]) -> None:
        """Wait until all of a group are ready, or somebody asks to stop.

        Raises:
            StartupFailed: a process ended before it was ready.
        """

        async def all_ready() -> None:
            for role in group:
                await role.ready.wait()

        ready = asyncio.create_task(all_ready())
        stopping = asyncio.create_task(self._stop.wait())
        waiting: set[asyncio.Future[Any]] = {ready, stopping, *self._keepers}
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            stopping.cancel()
        for keeper in self._keepers:
            if keeper.done():
                await keeper  # a keeper ends only by raising StartupFailed

    async def _keep(self, role: Role) -> None:
        """Keep a place filled for ever.

        Raises:
            StartupFailed: its first holder could not start.
        """
        while True:
            started = time.monotonic()
            await self._start(role)
            assert role.child is not None
            code = await role.child.wait()
            was_ready = role.ready.is_set()
            self._report_death(role)
            if not was_ready and role.backoff == FIRST_BACKOFF:
                raise StartupFailed(self._explain(role, code))
            if time.monotonic() - started > STABLE_AFTER:
                role.backoff = FIRST_BACKOFF
            self._console.print(
                f"[yellow]{role.name} {_ending(code)}[/]; again in {role.backoff:.1f} s",
                highlight=False,
                soft_wrap=True,
            )
            role.ready.clear()
            await asyncio.sleep(role.backoff)
            role.backoff = min(LONGEST_BACKOFF, role.backoff * 2)

    async def _start(self, role: Role) -> None:
        role.incarnation = secrets.randbits(48)
        role.failure = None
        role.phase = "starting"

        def on_status(status: ChildStatus) -> None:
            match status:
                case ChildProgress(phase):
                    role.phase = phase
                    logger.debug("%s: %s", role.name, phase)
                case ChildReady(detail):
                    role.phase = "ready"
                    role.ready.set()
                    elapsed = time.monotonic() - self._started_at
                    self._console.print(
                        f"[green]{role.name}[/] ready after {elapsed:.1f} s: {detail}",
                        highlight=False,
                        soft_wrap=True,
                    )
                case ChildFailed(reason):
                    role.failure = reason

        role.child = await Child.start(
            role.name,
            role.module,
            role.launch(role.incarnation),
            on_status=on_status,
            on_line=functools.partial(relay_line, role.name, self._config.log.log_format),
            environment=role.environment,
            inherit=role.inherit,
        )

    def _explain(self, role: Role, code: int) -> str:
        if code == CANNOT_START and role.failure is not None:
            return f"{role.name}: {role.failure}"
        assert role.child is not None
        lines = "\n".join(f"    {line}" for line in role.child.last_lines)
        return f"{role.name} {_ending(code)} while {role.phase}. Its last words:\n{lines}"

    def _report_death(self, role: Role) -> None:
        """Tell the coordinator at once, so that nobody waits for missing heartbeats."""
        if role.member is None:
            return
        if self._registration is None:
            transport = Transport(self._config.cluster, self._context)
            self._registration = transport.connect(
                zmq.DEALER, self._config.cluster.coordinator, identity=b"supervisor"
            )
        kind, index = role.member
        self._registration.send(encode(Goodbye(kind, index, role.incarnation)))

    def _announce(self) -> None:
        assert self._listener is not None
        host, port = self._listener.getsockname()[:2]
        elapsed = time.monotonic() - self._started_at
        url = f"{self._config.guards.scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        self._console.print(
            f"[bold green]swell is ready[/] after {elapsed:.1f} s: {url}  (Ctrl-C stops it)",
            highlight=False,
            soft_wrap=True,
        )

    # -- stopping --------------------------------------------------------------------------------

    async def _stop_all(self, roles: list[Role]) -> None:
        """Let front ends drain, then stop engines, then the coordinator; kill what hangs."""
        kinds = [role.member[0] if role.member is not None else "coordinator" for role in roles]
        for kind in ("front_end", "engine", "coordinator"):
            of_kind = [role for role, each in zip(roles, kinds, strict=True) if each == kind]
            children = [role.child for role in of_kind if role.child is not None]
            for child in children:
                child.terminate()
            promised = self._config.http.shutdown_timeout if kind == "front_end" else 0.0
            await self._wait_for(children, promised + STOP_TIMEOUT)

    async def _wait_for(self, children: list[Child], within: float) -> None:
        if not children:
            return
        endings = asyncio.ensure_future(asyncio.gather(*(child.wait() for child in children)))
        force = asyncio.ensure_future(self._force.wait())
        waiting: set[asyncio.Future[Any]] = {endings, force}
        await asyncio.wait(waiting, timeout=within, return_when=asyncio.FIRST_COMPLETED)
        for child in children:
            if child.alive:
                logger.warning("%s did not stop in time: killed", child.name)
                child.kill()
        await endings
        force.cancel()

    def _clean_up(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._context.destroy(linger=0)
        if self._own_directory:
            shutil.rmtree(self._directory, ignore_errors=True)
        else:
            self._empty_directory()

    def _empty_directory(self) -> None:
        for entry in self._directory.iterdir():
            with contextlib.suppress(OSError):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _ending(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def run(config: ServeConfig) -> int:
    """Run `swell serve` and return the exit code."""
    console = Console(stderr=True)
    if config.log.log_format == "json":
        console = Console(file=LogLines(logger))
    return asyncio.run(_run(config, console))


async def _run(config: ServeConfig, console: Console) -> int:
    try:
        return await Supervisor(config, console).run()
    except OSError as error:
        console.print(f"[bold red]swell cannot start:[/] {error}", highlight=False, soft_wrap=True)
        return 1
