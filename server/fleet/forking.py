"""Forks a node's first processes from templates that have preloaded their libraries.

A template (`engine.shared.template`) serves processes that start together. Once these are forked it
is stopped, so that it holds no memory. Processes that start later, or cannot be forked for any
reason, load their libraries themselves.
"""

import asyncio
import contextlib
import ctypes
import functools
import logging
import os
import signal
import socket
from collections.abc import Iterator, Sequence

import msgspec

from engine.shared.config import EngineConfig, EngineLaunch
from engine.shared.logs import relay_line
from engine.shared.messages import ChildReady, ChildStatus
from engine.shared.template import FORK, MAX_ANSWER_BYTES, ForkReply, TemplateLaunch
from server.config import ServeConfig
from server.fleet.child import Child, ForkedProcess, Program, has_pidfds
from server.fleet.keeper import Role
from server.fleet.node_resources import visible_devices

logger = logging.getLogger(__name__)

LOAD_TIMEOUT = 60.0
"""Maximum seconds for a template to load; beyond that, loading in each process is faster."""

ANSWER_TIMEOUT = 5.0
"""Maximum seconds for a template to fork; the supervisor blocks meanwhile."""

_SET_CHILD_SUBREAPER = 36

# -- what to fork --------------------------------------------------------------------------------


def forkable_kinds(
    config: ServeConfig, engines: Sequence[EngineConfig], *, can_fork: bool, devices: int
) -> tuple[bool, bool]:
    """Return whether to fork the engines, and the front ends, of this node at its start.

    A template for a single process would gain nothing.

    Args:
        engines: settings of each engine of this node.
        can_fork: whether the system supports it.
        devices: number of CUDA devices visible to engines.
    """
    if config.supervisor.start_method == "exec" or not can_fork:
        return False, False
    forks_engines = (
        config.ray.data_parallel_backend == "mp"
        and len(engines) > 1
        and all(_can_be_forked(each, devices) for each in engines)
    )
    return forks_engines, config.supervisor.api_server_count > 1


def _can_be_forked(config: EngineConfig, devices: int) -> bool:
    """Return whether an engine computes in its own process, on CPUs, unbound.

    Accelerator drivers do not survive a fork, an engine with workers starts them itself, and LLVM's
    OpenMP runtime keeps the CPU affinity from the time it was loaded.
    """
    device, executor = config.model.device, config.executor
    return (
        (device == "cpu" or (device == "auto" and not devices))
        and executor.executor == "model"
        and executor.engine_backend == "swell"
        and executor.engine_python is None
        and not executor.bound_to
        and config.parallel.processes == 1
    )


async def start_templates(
    config: ServeConfig, engines: Sequence[Role], front_ends: Sequence[Role]
) -> list["Template"]:
    """Start the templates that the settings allow, and make these roles fork from them."""
    launches: list[EngineLaunch] = [role.launch(0) for role in engines]
    kinds = forkable_kinds(
        config,
        [launch.config for launch in launches],
        can_fork=has_pidfds(),
        devices=visible_devices(os.environ),
    )
    started = []
    for enabled, roles in zip(kinds, (engines, front_ends), strict=True):
        if not enabled:
            continue
        first, template = roles[0], Template(len(roles))
        name = f"template of {first.module}"
        program = Program(
            name=name,
            module=f"{first.module}.template_main",
            launch=None,
            environment=first.environment,
            inherit=first.inherit,
            on_status=template.on_status,
            on_line=functools.partial(relay_line, name, config.log.log_format),
        )
        await template.load(program, launches[0].config if roles is engines else None)
        for role in roles:
            role.start = template.start
        started.append(template)
    return started


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Make orphaned descendants children of this process meanwhile."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class CannotFork(Exception):
    """A template did not fork a requested process."""


class Template:
    """The supervisor's side of one template process.

    Args:
        forks: number of processes to fork, after which it is stopped.
    """

    def __init__(self, forks: int) -> None:
        self._remaining_forks = forks
        self._connection, self._template_end = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )
        self._connection.settimeout(ANSWER_TIMEOUT)
        self._child: Child | None = None
        self._ended: asyncio.Task[None] | None = None
        self._usable = False
        self._decided = asyncio.Event()
        """Set once the template is known to be usable or not."""

    async def load(self, program: Program, engine: EngineConfig | None) -> None:
        """Start the template, which loads its libraries in the background.

        Args:
            program: its module, and what its forks inherit; its launch is made here.
            engine: settings of the engines to fork, if it is a template of engines.
        """
        with self._template_end as connection:
            launch = TemplateLaunch(program.name, connection.fileno(), engine)
            inherit = [*program.inherit, connection.fileno()]
            try:
                child = await Child.start(
                    msgspec.structs.replace(program, launch=launch, inherit=inherit)
                )
            except OSError as error:
                logger.warning("%s cannot be started: %s", program.name, error)
                self._decide(usable=False)
                return
        self._child = child
        self._ended = asyncio.create_task(self._follow(child))

    @property
    def pid(self) -> int:
        """Its process id; 0 if it is not running."""
        return self._child.pid if self._child is not None and self._child.alive else 0

    async def start(self, program: Program) -> Child:
        """Fork a program's process, or start it without the template if that fails: a `Starter`.

        Raises:
            OSError: the process cannot be created.
        """
        try:
            async with asyncio.timeout(LOAD_TIMEOUT):
                await self._decided.wait()
        except TimeoutError:
            logger.warning("%s loads its libraries itself: a template takes too long", program.name)
            if self._child is not None:
                await self._child.end_hung()
            self._stop()
        if self._usable:
            try:
                child = await self._fork(program.name)
            except CannotFork as error:
                logger.warning("%s loads its libraries itself: %s", program.name, error)
                self._stop()
            else:
                child.attach(program)
                self._remaining_forks -= 1
                if not self._remaining_forks:
                    self._stop()
                return child
        return await Child.start(program)

    async def close(self) -> None:
        """Kill the template and wait for its exit. Its forks are not affected."""
        self._stop()
        if self._ended is not None:
            await self._ended

    def on_status(self, status: ChildStatus) -> None:
        """Handle a status message of the template."""
        if isinstance(status, ChildReady) and not self._decided.is_set():
            self._decide(usable=True)

    async def _follow(self, child: Child) -> None:
        end = await child.wait()
        if not self._decided.is_set():
            logger.warning("%s %s before it could be used", child.name, end.description)
        self._decide(usable=False)

    def _decide(self, *, usable: bool) -> None:
        self._usable = usable
        self._decided.set()

    def _stop(self) -> None:
        self._decide(usable=False)
        self._connection.close()
        if self._child is not None:
            self._child.kill()  # it has nothing to clean up

    async def _fork(self, name: str) -> Child:
        with contextlib.ExitStack() as on_failure, contextlib.ExitStack() as child_ends:
            lifeline, child_end = socket.socketpair()
            on_failure.callback(lifeline.close)  # also ends a process that was forked
            child_ends.callback(child_end.close)
            output, its_output = os.pipe()
            pipe = on_failure.enter_context(os.fdopen(output, "rb", 0))
            child_ends.callback(os.close, its_output)
            process = ForkedProcess(self._request_fork([child_end.fileno(), its_output]))
            on_failure.callback(process.send_signal, signal.SIGKILL)
            child_ends.close()
            await process.read_from(pipe)
            on_failure.pop_all()
        return Child(name, process, lifeline)

    def _request_fork(self, descriptors: list[int]) -> int:
        """Make the template fork; return the pid of the process, which is a child of this one."""
        try:
            with adopting_orphans():
                socket.send_fds(self._connection, [FORK], descriptors)
                data = self._connection.recv(MAX_ANSWER_BYTES)
            answer = msgspec.msgpack.decode(data, type=ForkReply)
        except (OSError, msgspec.DecodeError) as error:
            raise CannotFork(f"the template does not answer: {error or repr(error)}") from error
        if not answer.pid:
            raise CannotFork(answer.refusal)
        try:
            os.waitid(os.P_PID, answer.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # another subreaper adopted it
            raise CannotFork("its fork has not become a child of the supervisor") from None
        return answer.pid
