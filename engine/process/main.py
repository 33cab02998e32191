"""The engine process: joins the cluster, loads the model, then loops until it is stopped.

The receiver thread reads every socket, and the main thread runs steps and writes their results.
Requests pass between them through one queue, the inbox; they also share a few thread-safe objects:
the sender, the health state, the step watch and the group connection.
"""

import logging
import secrets
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

import zmq
from msgspec.structs import replace

from engine.batch.executor import Executor, GroupExecutor
from engine.core.adapter_manager import AdapterManager
from engine.core.engine_core import EngineCore
from engine.core.events import (
    AdaptersSettled,
    Drain,
    InboxItem,
    PrerequisitesSettled,
    Stop,
    Welcomed,
)
from engine.core.hosted import Backend, HostedEngine, missing_members
from engine.core.loop import EngineLoop
from engine.core.sender import Sender
from engine.core.shutdown import Shutdown
from engine.core.steps import StepFailed
from engine.core.watchdog import StepWatch, Watchdog
from engine.core.wave_clock import WaveClock
from engine.executor.environment import bind_cpus, compute_processes, configure_environment
from engine.executor.rules import check_draft_settings, check_pooling, image_refusal
from engine.executor.team import Team
from engine.kv.event_publisher import KvEventPublisher, check_events, read_settings
from engine.kv.events import KvEventLog
from engine.kv.tier_opening import BadTiers, KvMemory, check_tiers, model_name, open_tiers
from engine.kv.tiers import KvTiers
from engine.kv.transfer_port import open_port
from engine.kv.transfer_settings import read_transfer
from engine.lockstep.grouping import GroupConnection, Grouping
from engine.lockstep.loop import LockstepLoop
from engine.lockstep.wave import EngineWave, Phase
from engine.lora.modules import AdaptableModules
from engine.lora.store import AdapterStore
from engine.models.fallback.choice import check_fallback, implementation
from engine.models.hf_config import read_config, read_spec
from engine.models.spec import check_heads
from engine.process.early_stop import EarlyStop
from engine.process.receiver import Receiver, build_reception, configured_adapters
from engine.process.reception import Serve, SetAdapters, SetGroupStatus, StartDrain
from engine.shared.cluster_keys import InsecureCluster
from engine.shared.config import EngineConfig
from engine.shared.health import Health, serve_health
from engine.shared.lifeline import CANNOT_START, Lifeline
from engine.shared.logs import name_process
from engine.shared.messages import (
    PUSHED,
    AdapterLoadResult,
    AdapterTable,
    EngineCounters,
    EngineDead,
    EngineSetup,
    GroupMember,
    KvRole,
)
from engine.shared.model_files import model_directory
from engine.shared.plugins import BadPlugin, load_plugin
from engine.shared.pooling import PoolingSpec, read_pooling
from engine.shared.process_state import end_signals, freeze_heap
from engine.shared.transport import Transport, advertised_host, make_context
from engine.vllm.arguments import check_settings

if TYPE_CHECKING:
    from engine.executor.nodes.leading import NodeLinks

logger = logging.getLogger(__name__)

B = TypeVar("B", bound=Backend)


class CannotStart(Exception):
    """The engine cannot start, and retrying would not help."""


def is_lockstep(config: EngineConfig) -> bool:
    """Return whether the engine is one of several that share the experts of a model.

    Raises:
        ModelNotFound: there is no such model.
        UnsupportedModel: its config needs something that is not implemented.
    """
    parallel = config.parallel
    if config.executor.engine_backend == "vllm":
        check_settings(config)
        return False
    if not parallel.enable_expert_parallel or parallel.data_parallel_size == 1:
        return False
    if config.executor.engine_backend != "swell":
        raise ValueError(
            "--enable-expert-parallel over several engines needs --engine-backend swell"
        )
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

    An executor with worker processes calls `on_failure`, from another thread, when one dies.
    Stopping the engine during startup leaves no worker behind.
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
    check_tiers(config, pools=pooling is not None)
    check_events(config, pools=pooling is not None)
    read_transfer(config.cache, rank)
    if config.executor.executor == "simulated":
        if config.cache.kv_cache_dtype != "auto":
            raise CannotStart(
                f"--kv-cache-dtype {config.cache.kv_cache_dtype} needs --executor model: the "
                "simulated one keeps no keys and values"
            )
        return _simulated_executor(config, directory, pooling)
    if pooling is None and implementation(directory, config.model) == "transformers":
        check_fallback(config)
    if config.parallel.tensor_parallel_size > 1 and (pooling is None or not pooling.is_encoder):
        check_heads(read_spec(directory), config.parallel.tensor_parallel_size)
    lifeline.progress("importing torch")
    engines_on_node = max(1, config.parallel.engines_on_node)
    configure_environment(compute_processes(config, engines_on_node))
    if pooling is not None and pooling.is_encoder:
        from engine.executor.encoding import EncoderExecutor

        return EncoderExecutor(config, pooling, engines_on_node, lifeline.progress)
    if config.parallel.processes > 1:
        return _team_executor(config, rank, engines_on_node, lifeline, early_stop, on_failure)
    from engine.executor.in_process import InProcessExecutor  # imports torch

    return InProcessExecutor(config, rank, engines_on_node, lifeline.progress)


def _team_executor(
    config: EngineConfig,
    rank: int,
    engines_on_node: int,
    lifeline: Lifeline,
    early_stop: EarlyStop,
    on_failure: Callable[[str], None] | None,
) -> Executor:
    """Wait for other nodes, if any; start all workers and load the model.

    Raises:
        OSError: a process cannot be started, or not all nodes have joined.
        WorkerFailed: a worker cannot start.
        ValueError: the model cannot be served with these settings.
    """
    team: Team | None = None
    nodes: NodeLinks | None = None
    try:
        if config.parallel.nnodes > 1:
            with early_stop.deferred():
                from engine.executor.nodes import leading  # few engines span nodes

                nodes = leading.NodeLinks(config)
            nodes.wait(lifeline.progress)
        with early_stop.deferred():
            team = Team(config, rank, engines_on_node, nodes, on_failure)
        from engine.executor.in_process import InProcessExecutor  # imports torch

        executor = InProcessExecutor(config, rank, engines_on_node, lifeline.progress, team)
        if nodes is not None:
            nodes.started()
        return executor
    except BaseException:
        with early_stop.deferred():
            if team is not None:
                team.close()
            if nodes is not None:
                nodes.close()
        raise


def _simulated_executor(
    config: EngineConfig, directory: Path, pooling: PoolingSpec | None
) -> Executor:
    from engine.executor.simulated import SimulatedExecutor
    from engine.grammar.masks import grammar_table

    if config.parallel.nnodes > 1:
        raise CannotStart("--nnodes needs --executor model: a simulated engine has no workers")
    model_config = read_config(directory)
    vocab_size = (model_config.get("text_config") or model_config)["vocab_size"]
    is_native = implementation(directory, config.model) == "swell" and pooling is None
    has_vision = is_native and model_config.get("vision_config") is not None
    adapters = None
    if config.lora.enable_lora:
        modules, rank = AdaptableModules(read_spec(directory)), config.lora.max_lora_rank
        adapters = AdapterStore(
            modules.max_size(rank), lambda files: bool(modules.pairs(files, rank))
        )
    vision = read_spec(directory).vision if has_vision else None
    if vision is not None and image_refusal(config, vision) is not None:
        vision = None
    return SimulatedExecutor(
        config,
        vocab_size=vocab_size,
        grammars=grammar_table(directory, vocab_size, ()),
        adapters=adapters,
        pooling=pooling,
        vision=vision,
    )


WAITING_INTERVAL = 10.0
"""Seconds between log lines while an engine waits for the coordinator."""


def wait_for_rank(inbox: "SimpleQueue[InboxItem]", timeout: float, where: str) -> Welcomed:
    """Wait until the coordinator has accepted this engine; `where` is its address, for errors.

    Raises:
        CannotStart: refused, or no answer within `timeout` seconds.
    """
    started_at = time.monotonic()
    while True:
        waited = time.monotonic() - started_at
        try:
            first = inbox.get(timeout=max(0.0, min(WAITING_INTERVAL, timeout - waited)))
            break
        except Empty:
            waited = time.monotonic() - started_at
            if waited >= timeout:
                raise CannotStart(
                    f"no coordinator answered at {where} within {timeout:.0f} s"
                ) from None
            logger.warning("no coordinator answers at %s yet, for %.0f s", where, waited)
    if isinstance(first, Stop):
        raise CannotStart(first.error or "stopped while joining")
    assert isinstance(first, Welcomed), first
    return first


class EngineProcess:
    """Connects the threads and stops them in order."""

    def __init__(self, config: EngineConfig, lifeline: Lifeline, incarnation: int) -> None:
        self._is_lockstep = is_lockstep(config)
        self._config = config
        self._lifeline = lifeline
        self._incarnation = incarnation
        self._watch = StepWatch(config.executor.step_timeout)
        self._health = Health(config.health.stall_timeout, may_wait=self._watch.is_within_budget)
        serve_health(config.health, self._health)
        self._early_stop = EarlyStop(partial(signal.setitimer, signal.ITIMER_REAL))
        self._kv_memory: KvMemory | None = None
        self._tiers: KvTiers | None = None
        self._kv_role: KvRole = ""
        self._kv_address = ""
        self._kv_events: KvEventLog | None = None
        self._kv_publisher: KvEventPublisher | None = None
        self._serving = False
        self._summary = ""
        self._stop_requested = False
        self._weight_version = ""
        self._inbox: SimpleQueue[InboxItem] = SimpleQueue()
        self._context: zmq.Context[zmq.Socket[bytes]] = make_context()
        self._transport = transport = Transport(config.cluster, self._context)
        self._connection = GroupConnection()
        self._sender = Sender(transport)
        self._reception = build_reception(config, incarnation, lockstep=self._is_lockstep)
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
        """Drain; at the second call, or during startup, stop immediately. For signal handlers.

        Raises:
            SystemExit: the engine does not serve yet.
        """
        if not self._serving:
            self._early_stop.request()
            return
        self._inbox.put(Stop() if self._stop_requested else Drain())
        self._stop_requested = True

    def run(self) -> int:
        """Serve until stopped and return the exit code."""
        self._sender.start()
        self._receiver.start()
        executor: Executor | None = None
        try:
            self._lifeline.progress("waiting for the coordinator")
            cluster = self._config.cluster
            welcome = wait_for_rank(self._inbox, cluster.join_timeout, cluster.coordinator_address)
            log = self._config.log
            name_process(f"engine {welcome.rank}", log.log_level, log.log_format)
            weights = self._reception.ordered_weights
            if weights is not None and weights.model != PUSHED:
                model = replace(self._config.model, model=weights.model, revision=weights.revision)
                self._config = replace(self._config, model=model)
                self._weight_version = weights.version
            if self._config.executor.engine_backend != "swell":
                return self._serve_backend(welcome)
            executor = build_executor(
                self._config,
                welcome.rank,
                self._lifeline,
                self._early_stop,
                lambda reason: self._inbox.put(Stop(reason)),
            )
            if executor.grammars is not None:
                executor.grammars.on_settled = lambda: self._inbox.put(PrerequisitesSettled())
            if executor.adapters is not None:
                executor.adapters.on_settled = lambda: self._inbox.put(AdaptersSettled())
            if isinstance(executor, KvMemory):
                self._open_tiers(executor, executor.info.model_fingerprint, welcome.rank)
            if self._tiers is not None:
                self._tiers.on_settled = lambda: self._inbox.put(PrerequisitesSettled())
            self._open_kv_events(executor, welcome.rank)
            if self._is_lockstep:
                return self._serve_lockstep(executor, welcome)
            core = self._core(executor, welcome.rank, WaveClock(welcome.wave))
            return self._serve(core, welcome.rank)
        finally:
            try:
                self._early_stop.startup_over()
            except SystemExit:  # a repeated request arrived at this moment
                self._early_stop.startup_over()
            with self._early_stop.deferred():
                self._receiver.stop()
                self._sender.stop()
                if self._tiers is not None:
                    self._tiers.shutdown()
                if self._kv_publisher is not None:
                    self._kv_publisher.shutdown()
                if executor is not None:
                    executor.shutdown()
                self._context.destroy(linger=0)

    def _open_tiers(self, executor: KvMemory, fingerprint: str, rank: int) -> None:
        self._kv_memory = executor
        counters, port = EngineCounters(), None
        opened = open_port(
            self._config,
            executor,
            self._context,
            rank=rank,
            incarnation=self._incarnation,
            counters=counters,
        )
        if opened is not None:
            port, self._kv_role, self._kv_address = opened
            logger.info("KV blocks: role %s %s", self._kv_role, self._kv_address)
        transfer = read_transfer(self._config.cache, rank)
        try:
            self._tiers = open_tiers(
                self._config,
                executor,
                fingerprint,
                peers=port,
                connectors=transfer.connectors if transfer else (),
                counters=counters,
            )
        except (BadTiers, BadPlugin):
            if port is not None:
                port.shutdown()
            raise

    def _open_kv_events(self, executor: Executor, rank: int) -> None:
        cache = self._config.cache
        settings = read_settings(cache.kv_events_config)
        if settings is None:
            return
        publisher = self._kv_publisher = KvEventPublisher(settings, rank, self._transport)
        logger.info("KV cache events are published at %s", ", ".join(publisher.endpoints))
        is_on_cpu = isinstance(executor, KvMemory) and executor.device_type == "cpu"
        medium = "CPU" if is_on_cpu or self._config.model.device == "cpu" else "GPU"
        self._kv_events = KvEventLog(cache.block_size, medium, publisher.publish)

    def _core(self, executor: Executor, rank: int, clock: WaveClock) -> EngineCore:
        """Return the engine core, with all adapters of the cluster loaded."""
        core = EngineCore(
            self._config,
            executor,
            rank=rank,
            incarnation=self._incarnation,
            tiers=self._tiers,
            kv_events=self._kv_events,
            clock=clock,
            on_adapters=self._report_adapters,
            on_setup=self._weights_changed,
            weight_version=self._weight_version,
            kv_role=self._kv_role,
            kv_address=self._kv_address,
        )
        self._load_adapters(core.adapters)
        return core

    def _serve_backend(self, welcome: Welcomed) -> int:
        name = self._config.executor.engine_backend
        configure_environment(
            compute_processes(self._config, max(1, self._config.parallel.engines_on_node))
        )

        def start(backend: Callable[..., B]) -> B:
            self._lifeline.progress(f"starting the engine of {name}")
            return backend(
                self._config,
                rank=welcome.rank,
                incarnation=self._incarnation,
                clock=WaveClock(welcome.wave),
                on_failure=lambda reason: self._inbox.put(Stop(reason)),
                weight_version=self._weight_version,
            )

        def start_plugin(backend: Callable[..., B]) -> B:
            core = start(backend)
            if missing := missing_members(core):
                raise TypeError(f"it has no {', '.join(missing)}")
            return core

        self._lifeline.progress(f"importing {name}")
        core: Backend
        adapters: AdapterManager | None = None
        if name != "vllm":
            core = load_plugin("swell.engine_backends", name, "--engine-backend", start_plugin)
        else:
            try:
                from engine.vllm.core import VllmCore  # from the environment of --engine-python
            except ImportError as error:
                raise CannotStart(
                    f"--engine-backend vllm: {error}; name the interpreter of an environment with "
                    "vLLM in --engine-python"
                ) from error
            vllm_core = start(
                partial(
                    VllmCore,
                    on_adapters=self._report_adapters,
                    on_adapter_read=lambda: self._inbox.put(AdaptersSettled()),
                )
            )
            core, adapters = vllm_core, vllm_core.adapters
        try:
            if adapters is not None:
                self._load_adapters(adapters)
            return self._serve(core, welcome.rank)
        finally:
            with self._early_stop.deferred():
                core.shutdown()

    def _serve(self, core: HostedEngine, rank: int) -> int:
        self._ready(core.setup)
        loop = EngineLoop(
            core,
            self._inbox,
            self._sender,
            self._watch,
            drain_timeout=self._config.cluster.drain_timeout,
            on_iteration=self._health.record_iteration,
            on_drain=self._drain,
        )
        return self._loop_until_stopped(loop, rank)

    def _serve_lockstep(self, executor: Executor, welcome: Welcomed) -> int:
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
        core = self._core(executor, rank, wave)
        grouping = Grouping(
            GroupMember(rank, incarnation),
            executor,
            self._connection,
            host=advertised_host(self._config.cluster),
            timeout=self._config.parallel.group_timeout,
            report=lambda status: self._receiver.submit(SetGroupStatus(status)),
        )
        self._lifeline.progress("waiting for the other engines")
        loop = LockstepLoop(
            core,
            wave,
            grouping,
            Shutdown(core, self._config.cluster.drain_timeout),
            self._inbox,
            self._sender,
            self._watch,
            on_iteration=self._health.record_iteration,
            on_drain=self._drain,
            on_wave=self._reception.note_wave,
            on_joined=lambda: self._ready(core.setup),
        )
        try:
            return self._loop_until_stopped(loop, rank)
        finally:
            # The goodbye goes first, so that the others regroup on an order instead of an error.
            self._receiver.stop()
            loop.end()
            grouping.close()

    def _report_adapters(self, table: AdapterTable, held: list[AdapterLoadResult]) -> None:
        self._receiver.submit(SetAdapters(table, held))

    def _load_adapters(self, adapters: AdapterManager) -> None:
        """Load all adapters of the cluster before the first request can arrive.

        Raises:
            CannotStart: an adapter from the settings cannot be served.
        """
        # The adapter table may have changed while the model was loaded.
        adapter_table = self._reception.adapter_table or configured_adapters(self._config.lora)
        if adapter_table is None:
            return
        if adapter_table.entries:
            self._lifeline.progress("loading adapters")
        adapters.take(adapter_table)
        for entry, error in adapters.wait():
            if not entry.confined and not entry.version:  # from the settings, never served
                raise CannotStart(f"--lora-modules {entry.name}={entry.path}: {error}")

    def _weights_changed(self, setup: EngineSetup) -> None:
        if self._tiers is not None and self._kv_memory is not None:
            self._tiers.model = model_name(self._kv_memory, setup.model_fingerprint)
        self._receiver.submit(Serve(setup))

    def _drain(self) -> None:
        self._health.drain()
        self._receiver.submit(StartDrain())

    def _ready(self, setup: EngineSetup) -> None:
        """Report to the cluster that the engine serves; only the first call counts."""
        if self._serving:
            return
        self._serving = True
        freeze_heap()
        self._summary = f"KV cache of {setup.num_kv_blocks} blocks ({setup.kv_tokens:,} tokens)"
        if self._config.executor.bound_to:
            self._summary += f", on CPUs {self._config.executor.cpu_bind}"
        self._receiver.submit(Serve(setup))

    def _routed(self) -> None:
        """Report to the supervisor that front ends use the engine; called by the receiver."""
        self._health.ready()
        self._lifeline.ready(self._summary)

    def _loop_until_stopped(self, loop: EngineLoop | LockstepLoop, rank: int) -> int:
        def report_failure(reason: str) -> None:
            self._sender.send_failure(EngineDead(rank, self._incarnation, reason))

        watchdog = Watchdog(self._watch, self._config.executor.step_timeout, report_failure)
        watchdog.start()
        try:
            stop = loop.run()
        except Exception as error:
            logger.exception("engine %d cannot continue", rank)
            reason = str(error) if isinstance(error, StepFailed) else repr(error)
            report_failure(reason)
            return 1
        finally:
            watchdog.stop()
        if stop.error is not None:
            logger.error("%s", stop.error)
            self._sender.send_failure(EngineDead(rank, self._incarnation, stop.error))
            return 1
        return 0


def run(config: EngineConfig, lifeline: Lifeline, incarnation: int | None = None) -> int:
    """Run one engine until a signal and return the exit code."""
    name_process("engine", config.log.log_level, config.log.log_format)
    config = bind_cpus(config)
    lifeline.watch()
    if incarnation is None:
        incarnation = secrets.randbits(48)
    try:
        process = EngineProcess(config, lifeline, incarnation)
        for signum in (*end_signals(), signal.SIGALRM):  # the latter from `EarlyStop`
            signal.signal(signum, lambda *_: process.request_stop())
        return process.run()
    except SystemExit:  # stopped before it served
        return 0
    except (CannotStart, InsecureCluster, ValueError, OSError) as error:
        lifeline.failed(str(error))
        return CANNOT_START
