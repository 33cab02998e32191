"""The engine process: joins the cluster, loads the model, then loops until it is stopped.

The receiver thread reads every socket, and the main thread runs steps and writes their results.
Requests pass between them by one queue, the inbox; beside it they share what is made for several
threads: the sender, the health and the watch over a step's time, the connection of the group.
"""

import logging
import secrets
import signal
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue

import msgspec
import zmq

from engine.core.engine_core import EngineCore
from engine.core.events import AdaptersSettled, GrammarsSettled
from engine.core.steps import StepFailed
from engine.core.wave_clock import OwnClock
from engine.executor.binding import bound, sharers
from engine.executor.draft_rules import check_draft_settings
from engine.executor.environment import settle_environment
from engine.executor.interface import Executor, GroupExecutor
from engine.executor.pooling_rules import check_pooling
from engine.lockstep.group_connection import GroupConnection
from engine.lockstep.grouping import Grouping
from engine.lockstep.loop import LockstepLoop
from engine.lockstep.wave import EngineWave, Phase
from engine.lora.modules import AdaptableModules
from engine.lora.store import AdapterStore
from engine.models.fallback.choice import check_fallback, implementation
from engine.models.hf_config import read_spec
from engine.process.divided import divided_executor
from engine.process.early_stop import EarlyStop
from engine.process.ending import Ending
from engine.process.events import Drain, InboxItem, Stop, Welcomed
from engine.process.loop import EngineLoop
from engine.process.receiver import Receiver, build_reception
from engine.process.reception import HaveAdapters, Serve, StandInGroup, WantNothingNew
from engine.process.sender import Sender
from engine.process.turns import Turns
from engine.process.watchdog import StepWatch, Watchdog
from engine.shared.adapters import configured_adapters
from engine.shared.cluster_keys import InsecureCluster
from engine.shared.config import EngineConfig
from engine.shared.health import Health, serve_health
from engine.shared.heap import settle_heap
from engine.shared.lifeline import CANNOT_START, Lifeline
from engine.shared.logs import name_process
from engine.shared.membership import JOIN_TIMEOUT
from engine.shared.messages import AdapterSheet, EngineDead, GroupMember, HeldAdapter
from engine.shared.model_files import model_directory
from engine.shared.pooling import PoolingSpec, read_pooling
from engine.shared.transport import Transport, advertised_host, make_context

logger = logging.getLogger(__name__)


class CannotStart(Exception):
    """The engine cannot start, and trying again would not help."""


def steps_together(config: EngineConfig) -> bool:
    """Whether the engine is one of several that share the experts of a model.

    Raises:
        ModelNotFound: there is no such model.
        UnsupportedModel: its config asks for something that is not implemented.
    """
    parallel = config.parallel
    if not parallel.enable_expert_parallel or parallel.data_parallel_size == 1:
        return False
    directory = model_directory(config.model, weights=False)
    if implementation(directory, config.model) == "transformers":
        check_fallback(config)
    return read_spec(directory).moe is not None


def build_executor(
    config: EngineConfig,
    rank: int,
    lifeline: Lifeline,
    early_stop: EarlyStop,
    on_failure: Callable[[str], None] | None = None,
) -> Executor:
    """Load the model (or its simulation) as configured.

    An executor with processes of its own calls `on_failure`, in another thread, when one dies.
    None of them is left, whenever the engine is asked to stop.
    """
    if config.parallel.enable_expert_parallel and config.parallel.pipeline_parallel_size > 1:
        raise CannotStart(
            "--enable-expert-parallel needs --pipeline-parallel-size 1: use "
            "--tensor-parallel-size, or leave one of them out"
        )
    directory = model_directory(config.model, weights=False)
    pooling = read_pooling(directory, config.model)
    if pooling is not None:
        check_pooling(config, pooling)
    check_draft_settings(config)
    if config.executor.executor == "simulated":
        if config.cache.kv_cache_dtype != "auto":
            raise CannotStart(
                f"--kv-cache-dtype {config.cache.kv_cache_dtype} needs --executor model: the "
                "simulated one keeps no keys and values"
            )
        return _simulated_executor(config, directory, pooling)
    if pooling is None and implementation(directory, config.model) == "transformers":
        check_fallback(config)
    lifeline.progress("importing torch")
    engines_on_node = max(1, config.parallel.engines_on_node)
    settle_environment(sharers(config, engines_on_node))
    if pooling is not None and pooling.is_encoder:
        from engine.executor.encoding import EncoderExecutor

        return EncoderExecutor(config, pooling, engines_on_node, lifeline.progress)
    if config.parallel.processes > 1:
        return divided_executor(config, rank, engines_on_node, lifeline, early_stop, on_failure)
    from engine.executor.in_process import InProcessExecutor  # imports torch

    return InProcessExecutor(config, rank, engines_on_node, lifeline.progress)


def _simulated_executor(
    config: EngineConfig, directory: Path, pooling: PoolingSpec | None
) -> Executor:
    from engine.executor.simulated import SimulatedExecutor
    from engine.grammar.masks import grammar_table

    if config.parallel.nnodes > 1:
        raise CannotStart("--nnodes needs --executor model: a simulated engine has no workers")
    vocab_size = msgspec.json.decode((directory / "config.json").read_bytes())["vocab_size"]
    adapters = None
    if config.lora.enable_lora:
        modules = AdaptableModules(read_spec(directory))
        adapters = AdapterStore(modules, config.lora.max_lora_rank, lambda *_: True)
    return SimulatedExecutor(
        config,
        vocab_size=vocab_size,
        grammars=grammar_table(directory, vocab_size, ()),
        adapters=adapters,
        pooling=pooling,
    )


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
    """Wires the threads together and ends them in order.

    More than 15 attributes: it is the one place that holds all threads and what they share.
    """

    def __init__(self, config: EngineConfig, lifeline: Lifeline, incarnation: int) -> None:
        self._steps_together = steps_together(config)
        self._config = config
        self._lifeline = lifeline
        self._incarnation = incarnation
        self._health = Health(config.health.stall_timeout)
        serve_health(config.health, self._health)
        self._watch = StepWatch(config.executor.step_timeout)
        self._early_stop = EarlyStop()
        self._serving = False
        self._summary = ""
        self._asked_to_end = False
        self._inbox: SimpleQueue[InboxItem] = SimpleQueue()
        self._context: zmq.Context[zmq.Socket[bytes]] = make_context()
        transport = Transport(config.cluster, self._context)
        self._connection = GroupConnection()
        self._sender = Sender(transport)
        self._reception = build_reception(config, incarnation, lockstep=self._steps_together)
        self._receiver = Receiver(
            config.cluster.coordinator_address,
            incarnation,
            transport,
            self._context,
            reception=self._reception,
            inbox=self._inbox,
            outputs=self._sender,
            connection=self._connection,
            on_routed=self._routed,
        )

    def request_stop(self) -> None:
        """Drain, at the second call end at once, as while starting; for signal handlers.

        Raises:
            SystemExit: the engine does not serve yet.
        """
        if not self._serving:
            self._early_stop.ask()
            return
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
            executor = build_executor(
                self._config,
                welcome.rank,
                self._lifeline,
                self._early_stop,
                lambda reason: self._inbox.put(Stop(reason)),
            )
            if executor.grammars is not None:
                executor.grammars.on_settled = lambda: self._inbox.put(GrammarsSettled())
            if executor.adapters is not None:
                executor.adapters.on_settled = lambda: self._inbox.put(AdaptersSettled())
            if self._steps_together:
                return self._serve_together(executor, welcome)
            return self._serve_alone(executor, welcome)
        finally:
            with self._early_stop.held():
                self._receiver.stop()
                self._sender.stop()
                if executor is not None:
                    executor.shutdown()
                self._context.destroy(linger=0)

    def _serve_alone(self, executor: Executor, welcome: Welcomed) -> int:
        clock = OwnClock(welcome.wave)
        core = EngineCore(
            self._config,
            executor,
            rank=welcome.rank,
            incarnation=self._incarnation,
            clock=clock,
            on_adapters=self._has_adapters,
        )
        self._load_adapters(core)
        self._ready(core, executor)
        loop = EngineLoop(
            core,
            Turns(core, self._config.cluster.drain_timeout),
            self._inbox,
            self._sender,
            self._watch,
            on_turn=self._health.turn,
            on_drain=self._drain,
        )
        return self._loop_until_stopped(loop, welcome.rank)

    def _serve_together(self, executor: Executor, welcome: Welcomed) -> int:
        if not isinstance(executor, GroupExecutor):
            raise CannotStart("this executor cannot share the experts with other engines")
        rank, incarnation = welcome.rank, self._incarnation
        wave = EngineWave(
            rank=rank,
            incarnation=incarnation,
            wave=welcome.wave,
            max_in_flight=1 + self._config.scheduler.steps_overlap,
            phase=Phase.APART,
        )
        core = EngineCore(
            self._config,
            executor,
            rank=rank,
            incarnation=incarnation,
            clock=wave,
            on_adapters=self._has_adapters,
        )
        self._load_adapters(core)
        grouping = Grouping(
            GroupMember(rank, incarnation),
            executor,
            self._connection,
            host=advertised_host(self._config.cluster),
            timeout=self._config.parallel.group_timeout,
            report=lambda status: self._receiver.tell(StandInGroup(status)),
        )
        self._lifeline.progress("waiting for the other engines")
        loop = LockstepLoop(
            core,
            wave,
            grouping,
            Ending(core, self._config.cluster.drain_timeout),
            self._inbox,
            self._sender,
            self._watch,
            on_turn=self._health.turn,
            on_drain=self._drain,
            on_wave=self._reception.note_wave,
            on_joined=lambda: self._ready(core, executor),
        )
        try:
            return self._loop_until_stopped(loop, rank)
        finally:
            # The goodbye goes first, so that the others regroup on an order and not on an error.
            self._receiver.stop()
            loop.end()
            grouping.close()

    def _has_adapters(self, sheet: AdapterSheet, held: list[HeldAdapter]) -> None:
        self._receiver.tell(HaveAdapters(sheet, held))

    def _load_adapters(self, core: EngineCore) -> None:
        """Have all adapters of the cluster before the first request can come.

        Raises:
            CannotStart: one of the settings cannot be served.
        """
        # It may have changed while the model was loaded.
        sheet = self._reception.sheet or configured_adapters(self._config.lora)
        if sheet is None:
            return
        if sheet.entries:
            self._lifeline.progress("loading adapters")
        core.adapters.take(sheet)
        for entry, error in core.adapters.wait():
            if not entry.confined and not entry.version:  # it has never been served
                raise CannotStart(f"--lora-modules {entry.name}={entry.path}: {error}")

    def _drain(self) -> None:
        self._health.drain()
        self._receiver.tell(WantNothingNew())

    def _ready(self, core: EngineCore, executor: Executor) -> None:
        """Tell the cluster that the engine serves, the first time."""
        if self._serving:
            return
        self._serving = True
        settle_heap()
        info = executor.info
        num_groups = len(info.cache_windows)
        tokens = info.num_kv_blocks // num_groups * self._config.cache.block_size
        self._summary = f"KV cache of {info.num_kv_blocks} blocks ({tokens:,} tokens)"
        if self._config.executor.bound_to:
            self._summary += f", on CPUs {self._config.executor.cpu_bind}"
        self._receiver.tell(Serve(core.setup))

    def _routed(self) -> None:
        """Tell whoever started the engine that it can be counted on; called by the receiver."""
        self._health.ready()
        self._lifeline.ready(self._summary)

    def _loop_until_stopped(self, loop: EngineLoop | LockstepLoop, rank: int) -> int:
        def tell(reason: str) -> None:
            self._sender.last_words(EngineDead(rank, self._incarnation, reason))

        watchdog = Watchdog(self._watch, self._config.executor.step_timeout, tell)
        watchdog.start()
        try:
            stop = loop.run()
        except Exception as error:
            logger.exception("engine %d cannot go on", rank)
            reason = str(error) if isinstance(error, StepFailed) else repr(error)
            tell(reason)
            return 1
        finally:
            watchdog.stop()
        if stop.error is not None:
            logger.error("%s", stop.error)
            self._sender.last_words(EngineDead(rank, self._incarnation, stop.error))
            return 1
        return 0


def run(config: EngineConfig, lifeline: Lifeline, incarnation: int | None = None) -> int:
    """Run one engine until SIGTERM or SIGINT and return the exit code."""
    name_process("engine", config.log.log_level, config.log.log_format)
    config = bound(config)
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
