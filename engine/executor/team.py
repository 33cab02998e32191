"""The worker processes of an engine: starting, commanding, watching and ending. No torch."""

import contextlib
import logging
import selectors
import socket
import threading
from collections.abc import Callable, Collection
from queue import SimpleQueue
from typing import TYPE_CHECKING

import msgspec

from engine.distributed.spec import listener_address, open_listener
from engine.executor.environment import compute_processes, configure_environment
from engine.executor.layout import Layout
from engine.executor.team_messages import Command, WorkerLaunch, WorkerReply
from engine.executor.worker_process import StartedWorker, end_worker, start_worker
from engine.shared.config import EngineConfig
from engine.shared.lifeline import FrameReader, pack_frame
from engine.shared.messages import ChildFailed, ChildStatus

if TYPE_CHECKING:
    from engine.executor.nodes.leading import NodeLinks  # few engines span nodes

logger = logging.getLogger(__name__)

CAUSE_TIMEOUT = 0.5
"""Seconds to wait, after a worker's error, for the death of another that may have caused it."""
FAILURE_TIMEOUT = 5.0
"""Seconds for a failure observed by one process to become known, on a busy machine."""
_MAX_MESSAGE = 1 << 20
"""Maximum bytes of a message from a worker, which may be on another node."""


class WorkerFailed(Exception):
    """A worker process has died or cannot continue, so the engine cannot either."""


class MismatchedWorkers(ValueError):
    """Workers, possibly on other nodes, do not match the engine's own process."""


class _Worker:
    """A worker process, on this or another node, with its two sockets."""

    def __init__(self, rank: int, started: StartedWorker) -> None:
        self.rank = rank
        self.process, self.lifeline, self.commands = started
        self.statuses = FrameReader(ChildStatus, _MAX_MESSAGE)
        self.answers = FrameReader(WorkerReply, _MAX_MESSAGE)
        self.has_answered = False
        """Before its first reply it imports libraries and reads no commands."""


class Team:
    """All workers of one engine."""

    def __init__(
        self,
        config: EngineConfig,
        engine: int,
        engines_on_node: int,
        nodes: "NodeLinks | None" = None,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        """Start the workers, which load their libraries in parallel with the caller.

        Args:
            nodes: links to the other nodes, if the engine spans several.
            on_failure: called once, in another thread, with the reason why the team is unusable.

        Raises:
            OSError: a process cannot be started; none is left running.
        """
        self.size = config.parallel.processes
        configure_environment(
            compute_processes(config, engines_on_node)
        )  # inherited by the workers
        self._on_failure = on_failure
        self.abort: Callable[[], None] | None = None
        """Called before `on_failure`: aborts collectives that wait for a worker."""
        self.listener = open_listener("127.0.0.1" if nodes is None else nodes.host)
        self.address = listener_address(self.listener)
        self._failure: str | None = None
        self._closing = False
        self._answers: SimpleQueue[WorkerReply | None] = SimpleQueue()
        self._workers: list[_Worker] = []
        self._thread = threading.Thread(target=self._watch, name="team", daemon=True)
        self._nodes = nodes
        layout = Layout.of(config.parallel)
        try:
            for rank in range(1, self.size):
                if nodes is not None and layout.node(rank):
                    self._workers.append(_Worker(rank, nodes.worker(rank)))
                    continue
                launch = WorkerLaunch(
                    config, engine, rank, self.size, self.address, engines_on_node
                )
                self._workers.append(_Worker(rank, start_worker(launch)))
            if nodes is not None:
                nodes.begin(engine, self.address)
        except OSError:
            self._disconnect()
            self._wait_for_all()
            raise
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers on this node."""
        return [worker.process.pid for worker in self._workers if worker.process is not None]

    def wait_until_loaded(self, device: str) -> None:
        """Wait until all workers have loaded their libraries.

        Args:
            device: device type of the engine's own process.

        Raises:
            WorkerFailed: a worker has died.
            MismatchedWorkers: a worker uses another device type.
        """
        for answer in self.collect():
            if answer.device != device:
                raise MismatchedWorkers(
                    f"a worker's device is {answer.device}, but that of the engine's own process "
                    f"is {device}: give all nodes the same --device"
                )

    def send(self, command: Command, ranks: Collection[int] | None = None) -> None:
        """Send a command to all workers, or to those of these ranks.

        Raises:
            WorkerFailed: a worker no longer listens.
        """
        frame = pack_frame(command)
        for worker in self._workers:
            if ranks is not None and worker.rank not in ranks:
                continue
            try:
                worker.commands.sendall(frame)
            except OSError as error:
                raise self.failure() from error

    def collect(self) -> list[WorkerReply]:
        """Wait for one reply from each worker; step commands are not replied to.

        Raises:
            WorkerFailed: a worker will not reply.
        """
        answers: list[WorkerReply] = []
        while len(answers) < len(self._workers):
            answer = self._answers.get()
            if answer is None:
                self._answers.put(None)  # for later calls
                raise self.failure()
            answers.append(answer)
        return answers

    def failure(self) -> WorkerFailed:
        """Return the failure, waiting until it is known."""
        if self._failure is None:
            self._thread.join(FAILURE_TIMEOUT)
        return WorkerFailed(self._failure or "the worker processes have lost each other")

    def close(self) -> None:
        """Terminate all workers; idempotent."""
        self._closing = True
        self._disconnect()
        self._thread.join()
        self._wait_for_all()

    def _disconnect(self) -> None:
        for worker in self._workers:
            for connection in (worker.lifeline, worker.commands):
                with contextlib.suppress(OSError):  # the other end closed first
                    connection.shutdown(socket.SHUT_RDWR)
            if worker.process is not None and not worker.has_answered:
                worker.process.kill()

    def _wait_for_all(self) -> None:
        for worker in self._workers:
            if worker.process is not None:
                end_worker(worker.process)
            worker.lifeline.close()
            worker.commands.close()
        self.listener.close()
        if self._nodes is not None:
            self._nodes.close()

    def _watch(self) -> None:
        """Pass on replies until a worker fails or the team is closed."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.lifeline, selectors.EVENT_READ, worker)
                selector.register(worker.commands, selectors.EVENT_READ, worker)
            complaint = ""
            while self._failure is None and not self._closing:
                ready = selector.select(CAUSE_TIMEOUT if complaint else None)
                for key, _ in ready:
                    try:
                        message = self._read(selector, key)
                        complaint = complaint or message
                    except msgspec.DecodeError as error:
                        self._failure = f"worker {key.data.rank} cannot be understood: {error}"
                if complaint and not ready:
                    self._failure = complaint
        if complaint and complaint != self._failure:
            logger.warning("%s", complaint)
        self._answers.put(None)
        if self._closing:
            return
        if self.abort is not None:
            self.abort()
        if self._on_failure is not None:
            self._on_failure(self._failure or "")

    def _read(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> str:
        """Read from a socket; return a worker's failure message, or ""."""
        worker: _Worker = key.data
        is_answer = key.fileobj is worker.commands
        data = b""
        with contextlib.suppress(OSError):
            data = (worker.commands if is_answer else worker.lifeline).recv(65536)
        if is_answer:
            for answer in worker.answers.feed(data):
                worker.has_answered = True
                self._answers.put(answer)
            if not data:
                selector.unregister(key.fileobj)  # its lifeline reports the cause
            return ""
        for status in worker.statuses.feed(data):
            if isinstance(status, ChildFailed):
                selector.unregister(key.fileobj)
                return f"worker {worker.rank}: {status.reason}"
        if not data:
            self._failure = self._failure or f"worker {worker.rank} has died"
        return ""
