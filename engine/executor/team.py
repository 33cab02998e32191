"""The worker processes of an engine: starts, commands, watches and ends them. No torch."""

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
from engine.executor.environment import settle_environment, sharers
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
"""Seconds after a worker's last words in which another's death shows, which they may be about."""
FAILURE_TIMEOUT = 5.0
"""Seconds in which a failure that somebody has met becomes known, on a busy machine."""
_LARGEST_WORD = 1 << 20
"""Bytes of what a worker, which may be on another node, says at once."""


class WorkerFailed(Exception):
    """A worker process has died or cannot go on, and with it the engine."""


class UnlikeWorkers(ValueError):
    """Workers, which may be on other nodes, do not go with the engine's own process."""


class _Worker:
    """One process, here or on another node, with its two sockets."""

    def __init__(self, rank: int, started: StartedWorker) -> None:
        self.rank = rank
        self.process, self.lifeline, self.commands = started
        self.statuses = FrameReader(ChildStatus, _LARGEST_WORD)
        self.answers = FrameReader(WorkerReply, _LARGEST_WORD)
        self.has_answered = False
        """Until it has, it imports libraries and reads no commands."""


class Team:
    """All workers of one engine."""

    def __init__(
        self,
        config: EngineConfig,
        engine: int,
        engines_on_node: int,
        elsewhere: "NodeLinks | None" = None,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        """Start the workers, which load their libraries while the caller goes on.

        Args:
            elsewhere: starts those of other nodes, if the engine spans any.
            on_failure: is told once, in another thread, why the team is of no use any more.

        Raises:
            OSError: a process cannot be started; none is left.
        """
        self.size = config.parallel.processes
        settle_environment(sharers(config, engines_on_node))  # which the workers inherit
        self._on_failure = on_failure
        self.abort: Callable[[], None] | None = None
        """Called before that: ends what waits for a worker in a collective."""
        self.listener = open_listener("127.0.0.1" if elsewhere is None else elsewhere.host)
        self.address = listener_address(self.listener)
        self._failure: str | None = None
        self._closing = False
        self._answers: SimpleQueue[WorkerReply | None] = SimpleQueue()
        self._workers: list[_Worker] = []
        self._thread = threading.Thread(target=self._watch, name="team", daemon=True)
        self._elsewhere = elsewhere
        layout = Layout.of(config.parallel)
        try:
            for rank in range(1, self.size):
                if elsewhere is not None and layout.node(rank):
                    self._workers.append(_Worker(rank, elsewhere.worker(rank)))
                    continue
                launch = WorkerLaunch(
                    config, engine, rank, self.size, self.address, engines_on_node
                )
                self._workers.append(_Worker(rank, start_worker(launch)))
            if elsewhere is not None:
                elsewhere.begin(engine, self.address)
        except OSError:
            self._dismiss()
            self._wait_for_all()
            raise
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers of this node."""
        return [worker.process.pid for worker in self._workers if worker.process is not None]

    def meet(self, device: str) -> None:
        """Wait until all have loaded their libraries.

        Args:
            device: the kind that the engine's own process computes on.

        Raises:
            WorkerFailed: one of them has died.
            UnlikeWorkers: one of them computes on another kind.
        """
        for answer in self.collect():
            if answer.device != device:
                raise UnlikeWorkers(
                    f"a worker's device is {answer.device}, but that of the engine's own process "
                    f"is {device}: give all nodes the same --device"
                )

    def tell(self, command: Command, ranks: Collection[int] | None = None) -> None:
        """Send a command to all, or to those of these ranks.

        Raises:
            WorkerFailed: one of them does not listen any more.
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
        """Wait for an answer of each worker; those that are only told steps give none.

        Raises:
            WorkerFailed: one of them will not answer.
        """
        answers: list[WorkerReply] = []
        while len(answers) < len(self._workers):
            answer = self._answers.get()
            if answer is None:
                raise self.failure()
            answers.append(answer)
        return answers

    def failure(self) -> WorkerFailed:
        """Return what went wrong, once it is known."""
        if self._failure is None:
            self._thread.join(FAILURE_TIMEOUT)
        return WorkerFailed(self._failure or "the worker processes have lost each other")

    def close(self) -> None:
        """End all workers; idempotent."""
        self._closing = True
        self._dismiss()
        self._thread.join()
        self._wait_for_all()

    def _dismiss(self) -> None:
        for worker in self._workers:
            for connection in (worker.lifeline, worker.commands):
                with contextlib.suppress(OSError):  # the other end was faster
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
        if self._elsewhere is not None:
            self._elsewhere.close()

    def _watch(self) -> None:
        """Pass answers on until a worker fails or all are told to end."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.lifeline, selectors.EVENT_READ, worker)
                selector.register(worker.commands, selectors.EVENT_READ, worker)
            complaint = ""
            while self._failure is None and not self._closing:
                ready = selector.select(CAUSE_TIMEOUT if complaint else None)
                for key, _ in ready:
                    try:
                        said = self._read(selector, key)
                        complaint = complaint or said
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
        """Read from a socket; return what a worker complains of, if it does."""
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
                selector.unregister(key.fileobj)  # its lifeline says what it died of
            return ""
        for status in worker.statuses.feed(data):
            if isinstance(status, ChildFailed):
                selector.unregister(key.fileobj)
                return f"worker {worker.rank}: {status.reason}"
        if not data:
            self._failure = self._failure or f"worker {worker.rank} has died"
        return ""
