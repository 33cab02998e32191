"""The worker processes of an engine: starts, commands, watches and ends them. No torch."""

import logging
import os
import selectors
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection
from queue import SimpleQueue

import msgspec

from engine.distributed.spec import listener_address, open_listener
from engine.executor.binding import sharers
from engine.executor.environment import settle_environment
from engine.executor.team_messages import Answer, Command, WorkerLaunch
from engine.shared.config import EngineConfig
from engine.shared.lifeline import LIFELINE_VARIABLE, FrameReader, pack_frame
from engine.shared.messages import ChildFailed, ChildStatus

logger = logging.getLogger(__name__)

WORKER_MODULE = "engine.executor.worker_main"
"""What workers run."""
END_TIMEOUT = 5.0
"""Seconds that workers get to end after their sockets were closed."""
CAUSE_TIMEOUT = 0.5
"""Seconds after a worker's last words in which another's death shows, which they may be about."""
FAILURE_TIMEOUT = 5.0
"""Seconds in which a failure that somebody has met becomes known, on a busy machine."""


class WorkerFailed(Exception):
    """A worker process has died or cannot go on, and with it the engine."""


class _Worker:
    """One process with its two sockets: its lifeline, and commands."""

    def __init__(self, launch: WorkerLaunch) -> None:
        self.rank = launch.rank
        self.lifeline, its_lifeline = socket.socketpair()
        self.commands, its_commands = socket.socketpair()
        with its_lifeline, its_commands:
            descriptors = its_lifeline.fileno(), its_commands.fileno()
            try:
                self.process = _started(*descriptors)
            except OSError:
                self.lifeline.close()
                self.commands.close()
                raise
        launch = msgspec.structs.replace(launch, commands=descriptors[1])
        try:
            self.lifeline.sendall(pack_frame(launch))
        except OSError:  # it has died already: whoever watches its lifeline sees it
            logger.debug("worker %d does not listen", self.rank)
        self.statuses = FrameReader(ChildStatus)
        self.answers = FrameReader(Answer)
        self.lives = True
        """Until its lifeline ends."""
        self.has_answered = False
        """Until it has, it imports libraries and reads no commands."""


class Team:
    """All workers of one engine."""

    def __init__(self, config: EngineConfig, engine: int, engines_on_node: int) -> None:
        """Start the workers, which load their libraries while the caller goes on.

        Raises:
            OSError: a process cannot be started; none is left.
        """
        self.size = config.parallel.processes
        settle_environment(sharers(config, engines_on_node))  # which the workers inherit
        self.on_failure: Callable[[str], None] | None = None
        """Called once, in a thread of its own, with the reason."""
        self.listener = open_listener("127.0.0.1")
        address = listener_address(self.listener)
        self._failure: str | None = None
        self._closing = False
        self._answers: SimpleQueue[Answer | None] = SimpleQueue()
        self.address = address
        self._workers: list[_Worker] = []
        self._thread = threading.Thread(target=self._watch, name="team", daemon=True)
        try:
            for rank in range(1, self.size):
                launch = WorkerLaunch(config, engine, rank, self.size, address, engines_on_node)
                self._workers.append(_Worker(launch))
        except OSError:
            self._dismiss()
            self._wait_for_all()
            raise
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

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

    def collect(self) -> list[Answer]:
        """Wait for an answer of each worker; those that are only told steps give none.

        Raises:
            WorkerFailed: one of them will not answer.
        """
        answers: list[Answer] = []
        while len(answers) < len(self._workers):
            answer = self._answers.get()
            if answer is None:
                raise self.failure()
            answers.append(answer)
        return answers

    def failure(self, within: float = FAILURE_TIMEOUT) -> WorkerFailed:
        """Return what went wrong, once it is known."""
        if self._failure is None:
            self._thread.join(within)
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
                _shut(connection)
            if not worker.has_answered:
                worker.process.kill()

    def _wait_for_all(self) -> None:
        for worker in self._workers:
            try:
                worker.process.wait(END_TIMEOUT)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            worker.lifeline.close()
            worker.commands.close()
        self.listener.close()

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
                    worker = key.data
                    if key.fileobj is worker.commands:
                        if not self._read_answers(worker):
                            selector.unregister(key.fileobj)  # its lifeline says what it died of
                    elif said := self._read_status(worker):
                        selector.unregister(key.fileobj)
                        complaint = complaint or said
                    elif not worker.lives:
                        self._failure = self._failure or f"worker {worker.rank} has died"
                if complaint and not ready:
                    self._failure = complaint
        if complaint and complaint != self._failure:
            logger.warning("%s", complaint)
        self._answers.put(None)
        if not self._closing and self.on_failure is not None:
            self.on_failure(self._failure or "")

    def _read_answers(self, worker: _Worker) -> bool:
        data = _received(worker.commands)
        for answer in worker.answers.feed(data):
            worker.has_answered = True
            self._answers.put(answer)
        return bool(data)

    def _read_status(self, worker: _Worker) -> str:
        """Return why a worker says that it cannot go on, if it says so."""
        data = _received(worker.lifeline)
        worker.lives = bool(data)
        for status in worker.statuses.feed(data):
            if isinstance(status, ChildFailed):
                return f"worker {worker.rank}: {status.reason}"
        return ""


def _started(lifeline: int, commands: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", WORKER_MODULE],
        stdin=subprocess.DEVNULL,
        env={**os.environ, LIFELINE_VARIABLE: str(lifeline)},
        pass_fds=(lifeline, commands),
        start_new_session=True,  # signals from a terminal are for the supervisor
    )


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65536)
    except OSError:
        return b""


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # the other end was faster
        logger.debug("a worker has ended already")
