"""The engine process: joins the cluster, loads the model, then loops until it is stopped.

Three threads: the receiver reads every socket, the sender writes every result, and the main
thread runs steps. They share two queues and nothing else.
"""

import logging
import secrets
import signal
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

import msgspec
import zmq

from engine.config import EngineConfig
from engine.core import EngineCore, StepFailed
from engine.executor.environment import settle_environment
from engine.executor.interface import Executor
from engine.lifeline import CANNOT_START, Lifeline
from engine.logs import name_process
from engine.membership import JOIN_TIMEOUT
from engine.messages import (
    AbortRequests,
    AddRequest,
    EngineDead,
    UtilityCall,
)
from engine.model_files import model_directory
from engine.receiver import (
    Drain,
    FrontEndJoined,
    FrontEndLeft,
    InboxItem,
    Receiver,
    Stop,
    WaveStarted,
    Welcomed,
)
from engine.sender import Dying, Sender, StepDone, UtilityDone
from engine.transport import InsecureCluster, Transport

logger = logging.getLogger(__name__)

IDLE_STATS_INTERVAL = 2.0
"""Seconds between stats of an engine without work, so that their age tells stale from idle."""


LATE_SENDS_SECONDS = 0.5
"""How long a draining engine without work waits for requests that are on their way."""

DRAINING_WAIT = 0.02
"""Seconds between looks at whether a draining engine may end."""


class CannotStart(Exception):
    """The engine cannot start, and trying again would not help."""


class EngineLoop:
    """The main thread: drain the inbox, step, hand the outputs to the sender."""

    def __init__(
        self,
        core: EngineCore,
        inbox: "SimpleQueue[InboxItem]",
        sender: Sender,
        *,
        on_drain: Callable[[], None],
        drain_timeout: float,
    ) -> None:
        self._core = core
        self._inbox = inbox
        self._outbox = sender.outbox
        self._on_drain = on_drain
        self._drain_timeout = drain_timeout
        self._draining_since: float | None = None
        self._stopped: Stop | None = None

    def run(self) -> Stop:
        """Step until something asks to stop.

        Raises:
            StepFailed: the model or the bookkeeping failed; the engine cannot go on.
        """
        while True:
            had_work = self._core.has_work
            self._drain(block=not had_work)
            if self._stopped is None and self._has_drained():
                self._stopped = Stop()
            if self._stopped is not None:
                return self._stopped
            if not self._core.has_work:
                continue
            if not had_work:
                # Work that begins and ends within one step has to be seen to have begun.
                self._outbox.put(StepDone(self._core.stats(), {}))
            step = self._core.step()
            self._outbox.put(StepDone(step.stats, step.outputs))
            for front_end, result in step.utility_results:
                self._outbox.put(UtilityDone(front_end, result))

    def _has_drained(self) -> bool:
        if self._draining_since is None:
            return False
        elapsed = time.monotonic() - self._draining_since
        if self._core.has_work:
            return elapsed > self._drain_timeout
        # What front ends sent before they heard of it may still be on its way.
        return elapsed > LATE_SENDS_SECONDS or not self._core.has_front_ends

    def _drain(self, *, block: bool) -> None:
        draining = self._draining_since is not None
        try:
            item = self._inbox.get(block, DRAINING_WAIT if draining else IDLE_STATS_INTERVAL)
        except Empty:
            if block:
                self._outbox.put(StepDone(self._core.stats(), {}))
            return
        self._take(item)
        while not self._inbox.empty():
            self._take(self._inbox.get())

    def _take(self, item: InboxItem) -> None:
        match item:
            case AddRequest() | AbortRequests() | UtilityCall():
                self._core.handle(item)
            case FrontEndJoined(index, incarnation):
                self._core.front_end_joined(index, incarnation)
            case FrontEndLeft(index):
                self._core.front_end_left(index)
            case WaveStarted(wave) | Welcomed(_, wave):
                self._core.wave = max(self._core.wave, wave)
            case Drain():
                self._draining_since = time.monotonic()
                self._on_drain()
            case Stop():
                self._stopped = item


def build_executor(config: EngineConfig, rank: int, lifeline: Lifeline) -> Executor:
    """Load the model (or its simulation) as configured."""
    if config.executor.executor == "simulated":
        from engine.executor.simulated import SimulatedExecutor

        model_config = model_directory(config.model, weights=False) / "config.json"
        vocab_size = msgspec.json.decode(model_config.read_bytes())["vocab_size"]
        return SimulatedExecutor(config, vocab_size=vocab_size)
    lifeline.progress("importing torch")
    settle_environment()
    from engine.executor.in_process import InProcessExecutor  # imports torch

    engines_on_node = config.parallel.data_parallel_size_local or config.parallel.data_parallel_size
    return InProcessExecutor(config, rank, engines_on_node, lifeline.progress)


def wait_for_rank(inbox: "SimpleQueue[InboxItem]", timeout: float) -> Welcomed:
    """Wait until the coordinator has accepted this engine.

    Raises:
        CannotStart: refused, or nobody answered.
    """
    try:
        first = inbox.get(timeout=timeout)
    except Empty:
        raise CannotStart(f"no coordinator answered within {timeout:.0f} s") from None
    if isinstance(first, Stop):
        raise CannotStart(first.error or "stopped while joining")
    assert isinstance(first, Welcomed), first
    return first


class EngineProcess:
    """Wires the threads together and ends them in order."""

    def __init__(self, config: EngineConfig, lifeline: Lifeline, incarnation: int) -> None:
        self._config = config
        self._lifeline = lifeline
        self._incarnation = incarnation
        self._serving = False
        self._asked_to_end = False
        self._inbox: SimpleQueue[InboxItem] = SimpleQueue()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        transport = Transport(config.cluster, self._context)
        self._sender = Sender(transport)
        self._receiver = Receiver(
            config,
            incarnation,
            transport,
            self._context,
            inbox=self._inbox,
            outbox=self._sender.outbox,
        )

    def request_stop(self) -> None:
        """Drain, at the second call end at once, as while starting; for signal handlers.

        Raises:
            SystemExit: the engine does not serve yet.
        """
        if not self._serving:
            raise SystemExit(0)
        self._inbox.put(Stop() if self._asked_to_end else Drain())
        self._asked_to_end = True

    def run(self) -> int:
        """Serve until stopped and return the exit code."""
        self._sender.start()
        self._receiver.start()
        executor: Executor | None = None
        try:
            self._lifeline.progress("waiting for the coordinator")
            welcome = wait_for_rank(self._inbox, JOIN_TIMEOUT)
            log = self._config.log
            name_process(f"engine {welcome.rank}", log.log_level, log.log_format)
            executor = build_executor(self._config, welcome.rank, self._lifeline)
            core = EngineCore(
                self._config, executor, rank=welcome.rank, incarnation=self._incarnation
            )
            core.wave = welcome.wave
            return self._serve(core, executor, welcome.rank)
        finally:
            self._receiver.stop()
            self._sender.stop()
            if executor is not None:
                executor.shutdown()
            self._context.destroy(linger=0)

    def _serve(self, core: EngineCore, executor: Executor, rank: int) -> int:
        info = executor.info
        self._receiver.ready(core.setup)
        self._serving = True
        tokens = info.num_kv_blocks * self._config.cache.block_size
        self._lifeline.ready(f"KV cache of {info.num_kv_blocks} blocks ({tokens:,} tokens)")
        try:
            stop = EngineLoop(
                core,
                self._inbox,
                self._sender,
                on_drain=self._receiver.drain,
                drain_timeout=self._config.cluster.drain_timeout,
            ).run()
        except Exception as error:
            logger.exception("engine %d cannot go on", rank)
            reason = str(error) if isinstance(error, StepFailed) else repr(error)
            self._sender.outbox.put(Dying(EngineDead(rank, self._incarnation, reason)))
            return 1
        if stop.error is not None:
            logger.error("%s", stop.error)
            return 1
        return 0


def run(config: EngineConfig, lifeline: Lifeline, incarnation: int | None = None) -> int:
    """Run one engine until SIGTERM or SIGINT and return the exit code."""
    name_process("engine", config.log.log_level, config.log.log_format)
    lifeline.watch()
    if incarnation is None:
        incarnation = secrets.randbits(48)
    try:
        process = EngineProcess(config, lifeline, incarnation)
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, lambda *_: process.request_stop())
        return process.run()
    except (CannotStart, InsecureCluster, ValueError, OSError) as error:
        lifeline.failed(str(error))
        return CANNOT_START
