"""The supervisor of a node's processes: start order, readiness, death, restart and stop."""

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
from rich.console import Console
from rich.markup import escape

from engine.shared.addresses import join_host_port, listen, listen_unix
from engine.shared.cluster_keys import InsecureCluster
from engine.shared.logs import LogLines
from engine.shared.messages import ControlRequest, Goodbye, encode
from engine.shared.model_files import ModelNotFound, model_directory
from engine.shared.node_directory import NodeDirectory
from engine.shared.plugins import install_command
from engine.shared.process_state import end_signals
from engine.shared.transport import Inbox, Transport, make_context
from server.config import ServeConfig
from server.fleet.backend import BadNode, CannotServe, ProcessBackend, check_span
from server.fleet.child import watch_children_without_threads
from server.fleet.forking import Template, start_templates
from server.fleet.keeper import Keeper, Role, StartupFailed
from server.fleet.node_link import NodeLink
from server.fleet.node_resources import engine_capacity, visible_devices
from server.fleet.roles import control_address, coordinator_role, front_end_roles
from server.fleet.scaling import EngineScaler, NodeApiServers
from server.fleet.usage_report import begin_usage_report, end_usage_report

if TYPE_CHECKING:
    from server.fleet.ray.backend import RayBackend

logger = logging.getLogger(__name__)

STOP_TIMEOUT = 5.0
"""Seconds for a child to exit, in addition to its drain timeout, before it is killed."""

PROGRESS_INTERVAL = 2.0
"""Seconds between log lines about processes that are not ready yet."""

MAINTENANCE_INTERVAL = 1.0
"""Seconds between checks of the node's directory."""


class Supervisor:
    """Starts a coordinator, engines and front ends, and keeps each of them running.

    `node` has the processes' shared files, which are kept intact.
    """

    def __init__(
        self, backend: "ProcessBackend | RayBackend", console: Console, node: NodeDirectory
    ) -> None:
        self._backend = backend
        self._console = console
        self._node = node
        config, leads, self._is_single_node, is_new = backend.joined
        self._config = config.changed(cluster={"socket_dir": str(self._node.path)})
        self._listener: socket.socket | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = make_context()
        self._registration: zmq.Socket[bytes] | None = None
        self._keeper = Keeper(
            console, config.log.log_format, self._report_death, node.keep,
            config.supervisor.hang_timeout,
        )  # fmt: skip
        cpus = backend.cpus_of_others
        self._coordinator = (
            [coordinator_role(self._config, is_new=is_new, cpus=cpus)] if leads else []
        )
        self._front_ends: list[Role] = []
        self._engines = {
            slot: backend.engine_role(self._config, slot, numbered=True)
            for slot in range(config.parallel.engines_on_node)
        }
        self._node_api_servers: NodeApiServers | None = None
        self._templates: list[Template] = []
        self._stop = asyncio.Event()
        self._force = asyncio.Event()

    # -- lifecycle -------------------------------------------------------------------------------

    async def run(self) -> int:
        """Serve until a signal; return the exit code.

        Raises:
            StartupFailed: startup failed; all processes have exited.
        """
        loop = asyncio.get_running_loop()
        for signum in end_signals():
            loop.add_signal_handler(signum, self._on_signal, signum)
        try:
            self._check()
            if self._config.supervisor.api_server_count:
                self._listener = self._listen()
                self._front_ends = front_end_roles(
                    self._config,
                    self._node,
                    self._listener.fileno(),
                    numbered=self._is_single_node,
                    scalable=not self._is_single_node or bool(self._engines),
                    cpus=self._backend.cpus_of_others,
                )
            if self._config.ray.api_server_placement == "every-node":
                port = self._config.http.port
                if self._listener is not None:
                    port = self._listener.getsockname()[1]  # the same on all nodes
                self._node_api_servers = NodeApiServers(
                    self._keeper,
                    self._engines,
                    lambda node: self._backend.api_server_role(self._config, node, port),
                    drain_within=self._config.http.shutdown_timeout + STOP_TIMEOUT,
                )
            await self._start_all()
            if not self._stop.is_set():
                self._announce()
                await self._scale_until_stopped()
            self._console.print("stopping")
            return 0
        finally:
            await self._stop_all()
            await self._close_templates()
            if self._listener is not None:
                self._listener.close()
                if self._config.http.uds is not None:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(self._config.http.uds)
            self._context.destroy(linger=0)

    def _check(self) -> None:
        here = self._config.supervisor.api_server_count + len(self._engines)
        lacks = self._is_single_node and not (
            self._config.supervisor.api_server_count and self._engines
        )
        if lacks or not here:
            raise StartupFailed(
                "a node that other nodes cannot join needs its own engines and API servers"
                if lacks
                else "nothing to run: neither engines nor API servers are configured"
            )

    def _on_signal(self, signum: int) -> None:
        # A closing terminal may send SIGHUP more than once.
        if self._stop.is_set() and signum != signal.SIGHUP:
            self._force.set()
        self._stop.set()

    def _listen(self) -> socket.socket:
        http = self._config.http
        try:
            if http.uds is None:
                listener = listen(http.host, http.port, 2048)
            else:
                listener = listen_unix(Path(http.uds), 2048)
        except OSError as error:
            flag = "--port" if http.uds is None else "--uds"
            # Errors of name resolution and of a path that is too long have no errno of the system.
            is_system = (error.errno or 0) > 0
            reason = os.strerror(error.errno or 0) if is_system else error.strerror or error
            advice = f"Choose another {flag}."
            if error.errno in (errno.EADDRINUSE, errno.EEXIST):
                advice = f"Is something else running there? {advice}"
            elif http.uds is None:
                advice = "Check --host and --port."
            raise StartupFailed(f"cannot listen on {http.address}: {reason}. {advice}") from error
        listener.setblocking(False)
        listener.set_inheritable(True)
        return listener

    # -- starting --------------------------------------------------------------------------------

    async def _start_all(self) -> None:
        others = [*self._engines.values(), *self._front_ends]
        # Front ends alone wait for engines without a limit; their probes report it.
        timeout = self._config.supervisor.startup_timeout if self._engines else None
        stopping = asyncio.create_task(self._stop.wait())
        logging_progress = asyncio.create_task(self._log_progress())
        engines = list(self._engines.values())
        self._templates = await start_templates(self._config, engines, self._front_ends)
        try:
            async with asyncio.timeout(timeout):
                for group in (self._coordinator, others):
                    for role in group:
                        self._keeper.keep(role)
                    await self._keeper.until_ready(group, stopping)
                if self._node_api_servers is not None and not self._stop.is_set():
                    await self._node_api_servers.until_ready(stopping)
        except TimeoutError:
            roles = [*self._coordinator, *others, *self._remote_front_ends]
            late = [role for role in roles if not role.ready.is_set()]
            names = ", ".join(f"{role.name} ({role.phase})" for role in late)
            raise StartupFailed(f"not ready within {timeout:.0f} s: {names}") from None
        finally:
            stopping.cancel()
            logging_progress.cancel()
        if not self._stop.is_set():  # else roles waiting for a template would start without it
            await self._close_templates()

    async def _close_templates(self) -> None:
        for each in self._templates:
            await each.close()

    async def _log_progress(self) -> None:
        logged: dict[str, str] = {}
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL)
            for role in self._engines.values() or self._front_ends:
                if not role.ready.is_set() and logged.get(role.name) != role.phase:
                    logged[role.name] = role.phase
                    self._print(f"{role.name}: {escape(role.phase)}")

    def _report_death(self, role: Role) -> None:
        """Report a death to the coordinator, which would otherwise wait for heartbeats."""
        if role.member is None:
            return
        for socket_file in self._node.path.glob(f"{role.incarnation:x}-*"):
            socket_file.unlink(missing_ok=True)  # sockets of a killed front end
        if self._registration is None:
            try:
                transport = Transport(self._config.cluster, self._context)
                self._registration = transport.connect(
                    zmq.DEALER,
                    self._config.cluster.coordinator_address,
                    identity=f"supervisor-{secrets.randbits(48):x}".encode(),
                )
            except (InsecureCluster, OSError):
                return  # the child could not have joined either
        kind, index = role.member
        self._registration.send(encode(Goodbye(kind, index, role.incarnation)))

    def _announce(self) -> None:
        if self._listener is None:
            self._console.print("[bold green]all engines are ready[/]")
            return
        address = self._config.http.address
        if self._config.http.uds is None:
            host, port = self._listener.getsockname()[:2]
            address = f"{self._config.guards.scheme}://{join_host_port(host, port)}"
        elapsed = self._keeper.elapsed
        self._print(
            f"[bold green]swell is ready[/] after {elapsed:.1f} s: {address}  (Ctrl-C stops it)"
        )
        parallel, head = self._config.parallel, self._config.nodes.data_parallel_address
        here, size = parallel.engines_on_node, parallel.data_parallel_size
        if self._coordinator and head is not None and here < size:
            self._print(
                f"{here} of {size} engines are on this node. Others join it with --headless "
                f"--data-parallel-address {head} and the same --data-parallel-size and cluster key"
            )

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    async def _scale_until_stopped(self) -> None:
        def engine_role(slot: int) -> Role:
            # Higher ranks may belong to other nodes, so the coordinator assigns them.
            numbered = self._is_single_node or slot < self._config.parallel.engines_on_node
            return self._backend.engine_role(self._config, slot, numbered=numbered)

        scaler = EngineScaler(
            self._keeper,
            self._engines,
            engine_role,
            retire_within=self._config.cluster.drain_timeout + STOP_TIMEOUT,
            start_within=self._config.supervisor.startup_timeout,
            is_single=self._config.parallel.nnodes > 1,
        )
        transport = Transport(self._config.cluster, self._context)
        socket = transport.bind(zmq.ROUTER, control_address(self._node.path))
        requests = Inbox(socket, ControlRequest, "control")
        tasks = [asyncio.create_task(_restart_on_error(scaler.run))]
        link = None
        if self._node_api_servers is not None:
            tasks.append(asyncio.create_task(_restart_on_error(self._node_api_servers.run)))
        if not self._backend.has_all:
            capacity = engine_capacity(self._config, visible_devices(os.environ))
            link = NodeLink(scaler, capacity, self._config.cluster, transport)
            tasks.append(asyncio.create_task(_restart_on_error(link.run)))

        def answer(sender: bytes, request: ControlRequest) -> None:
            status = (link or scaler).handle(request)
            if self._node_api_servers is not None:
                roles = [*self._front_ends, *self._remote_front_ends]
                phases = {role.name: role.phase for role in roles}
                status = msgspec.structs.replace(status, api_servers=phases)
            requests.send(sender, encode(status))

        requests.attach(asyncio.get_running_loop(), answer)
        tasks.append(asyncio.create_task(self._maintain(transport)))
        try:
            await self._stop.wait()
        finally:
            requests.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if link is not None:
                link.close()

    @property
    def _remote_front_ends(self) -> list[Role]:
        servers = self._node_api_servers
        return [] if servers is None else list(servers.roles.values())

    async def _maintain(self, transport: Transport) -> None:
        logged = ""
        while True:
            await asyncio.sleep(MAINTENANCE_INTERVAL)
            reason = ""
            try:
                self._node.keep()
                transport.maintain()
            except Exception as error:
                reason = str(error) or repr(error)
            if reason and reason != logged:
                logger.error("removed files in %s cannot be restored: %s", self._node.path, reason)
            logged = reason

    # -- stopping --------------------------------------------------------------------------------

    async def _stop_all(self) -> None:
        """Drain front ends, then stop engines, then the coordinator; kill processes that hang."""
        engines = list(self._engines.values())
        front_ends = [*self._front_ends, *self._remote_front_ends]
        for role in (*front_ends, *engines, *self._coordinator):
            await self._keeper.release(role)
        await self._end(front_ends, self._config.http.shutdown_timeout)
        for role in front_ends:
            self._report_death(role)  # so that engines need not finish their requests
        await self._end([role for role in engines if not role.ready.is_set()], 0.0)
        # Serving engines may have requests of front ends on other nodes.
        await self._end(
            engines, 0.0 if self._is_single_node else self._config.cluster.drain_timeout
        )
        await self._end(self._coordinator, 0.0)

    async def _end(self, roles: Sequence[Role], drain_timeout: float) -> None:
        """Terminate processes; kill those that have not exited in time or at a second signal."""
        children = [role.handle for role in roles if role.handle is not None]
        if not children:
            return
        for child in children:
            child.terminate()
        exits = asyncio.ensure_future(asyncio.gather(*(child.wait() for child in children)))
        force = asyncio.ensure_future(self._force.wait())
        waiting: set[asyncio.Future[Any]] = {exits, force}
        within = drain_timeout + STOP_TIMEOUT
        await asyncio.wait(waiting, timeout=within, return_when=asyncio.FIRST_COMPLETED)
        for child in children:
            if child.alive:
                logger.warning("%s did not stop in time: killed", child.name)
                child.kill()
        await exits
        force.cancel()


async def _restart_on_error(run: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await run()
        except Exception:
            logger.exception("a task of the supervisor failed and is restarted")
        await asyncio.sleep(MAINTENANCE_INTERVAL)


def run(config: ServeConfig) -> int:
    """Run `swell serve` and return the exit code."""
    console = Console(stderr=True)
    if config.log.log_format == "json":
        console = Console(file=LogLines(logger))
    watch_children_without_threads()
    needs_weights = (
        config.parallel.engines_on_node > 0
        and config.model.load_format != "dummy"
        and config.executor.executor == "model"
    )

    async def serve() -> int:
        with (
            NodeDirectory(config.cluster.socket_dir) as node,
            contextlib.closing(_backend_for(config, node.path)) as backend,
        ):
            return await Supervisor(backend, console, node).run()

    try:
        # Missing files of a hub model are downloaded here, with a progress display.
        directory = model_directory(config.model, weights=needs_weights)
        report = begin_usage_report(config, directory)
        code = 1
        try:
            code = asyncio.run(serve())
        finally:
            end_usage_report(config, report, code)
        return code
    # Printed after all processes have exited, so that it is the last output.
    except (OSError, BadNode, CannotServe, ModelNotFound, StartupFailed) as error:
        text = f"[bold red]swell cannot start:[/] {escape(str(error))}"
        console.print(text, highlight=False, soft_wrap=True)
        return 1


def _backend_for(config: ServeConfig, directory: Path) -> "ProcessBackend | RayBackend":
    check_span(config)
    if config.ray.data_parallel_backend == "mp":
        if config.ray.api_server_placement != "head":
            raise CannotServe(
                "--api-server-placement every-node is for --data-parallel-backend ray: on plain "
                "nodes run `swell api-server`, or `swell serve` without --headless"
            )
        return ProcessBackend(config, directory)
    try:
        from server.fleet.ray.backend import RayBackend
    except ModuleNotFoundError as error:
        raise CannotServe(
            f"--data-parallel-backend ray needs Ray ({error}): install it on every node with "
            f"{install_command('ray')}"
        ) from error
    return RayBackend(config, directory)
