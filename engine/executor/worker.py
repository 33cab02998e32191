"""A worker process of an engine: computes its part of the model on command.

It holds no requests and samples no tokens. It exits when the engine's process does, whatever the
reason, and reports fatal errors.
"""

import logging
import os
import select
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.batch.executor import CannotDo
from engine.batch.weight_transfer import SentTensors, announced_tensors
from engine.distributed.engines import EngineGroup, join_engines
from engine.distributed.grid import Grid, join_grid
from engine.distributed.group import Transfer
from engine.distributed.spec import GroupBroken, GroupSpec
from engine.executor.layout import Layout
from engine.executor.loading import LoadedModel, load_model, set_threads, take_device
from engine.executor.model_holder import ModelHolder
from engine.executor.step_thread import StepThread
from engine.executor.team_messages import (
    GROUP_TIMEOUT,
    Allocate,
    BeginTrial,
    Command,
    DummyStep,
    Embed,
    EndTrial,
    Forward,
    JoinGroup,
    LoadAdapter,
    Logits,
    PrepareGroup,
    ReadBlock,
    Rows,
    SettleWeights,
    Sleep,
    StartProfile,
    StopProfile,
    TakeWeights,
    WorkerLaunch,
    WorkerReply,
    WriteBlock,
)
from engine.models.adapters import AdapterRows, LowRank
from engine.models.attention.rows import AttentionRows
from engine.models.decoder import Decoder
from engine.models.formats.files import TensorFiles
from engine.models.loading.decoder import Shard
from engine.models.loading.mlps import GroupPosition
from engine.models.parallel.balance import ExpertBalance
from engine.models.parallel.experts import ExpertsLost, MirrorGroup
from engine.models.step import ImageTokens, StepTokens
from engine.runner.host_memory import keep_freed_memory
from engine.runner.inputs import other_groups, plans_of, whole_images
from engine.runner.kv_memory import (
    allocate_cache,
    as_bytes,
    available_memory,
    bytes_per_block,
    read_block,
    write_block,
)
from engine.runner.memory_profile import MemoryTrial
from engine.shared.lifeline import CANNOT_START, FrameReader, Lifeline, pack_frame
from engine.shared.logs import name_process
from engine.shared.process_state import end_signals

logger = logging.getLogger(__name__)

_MAX_PENDING_SENDS = 16
"""Maximum unfinished sends of states to the next stage; usually there are fewer."""


class Worker:
    """One rank other than the leader."""

    def __init__(self, launch: WorkerLaunch, grid: Grid, device: torch.device) -> None:
        self._config = launch.config
        self._rank = launch.rank
        self._processes = launch.engines_on_node * launch.config.parallel.processes_on_node
        layout = Layout.of(launch.config.parallel)
        self._stage = layout.position(launch.rank).stage
        self._is_last = self._stage == layout.stages - 1
        self._grid = grid
        self._device = device
        parallel, in_group = launch.config.parallel, None
        if parallel.enable_expert_parallel:
            size = parallel.data_parallel_size
            in_group = GroupPosition(launch.engine % size, size)
        self._engines: EngineGroup | None = None
        self._holder = ModelHolder(self._load, device, in_group, logger.debug)
        # A single engine has all experts in its own processes.
        self._holder.share_experts(grid.shards if parallel.data_parallel_size == 1 else None)
        self._cache: list[Tensor] = []
        self._steps = StepThread(device, own_thread=False)
        self._trial: MemoryTrial | None = None
        self._receives: deque[Transfer] = deque()
        """Receives of states from the previous stage, for pending steps."""
        self._sends: deque[Transfer] = deque()
        """Unfinished sends of states to the next stage."""
        configured = launch.config.cache.kv_cache_memory_bytes
        self.free_blocks = (
            configured or available_memory(device, self._processes)
        ) // self._block_bytes
        """KV blocks of this rank that fit in memory, as last measured."""
        keep_freed_memory()

    @torch.inference_mode()
    def prepare(self, command: Command) -> None:
        """Prepare for an upcoming command: its states may arrive before it is executed."""
        if isinstance(command, Forward) and self._stage > 0:
            model = self._loaded
            num_tokens = len(_integers(command.token_ids))
            states = torch.empty(
                num_tokens, model.spec.hidden_size, dtype=model.dtype, device=model.device
            )
            self._receives.append(self._grid.begin_receive(states))

    @torch.inference_mode()
    def execute(self, command: Command) -> bool:
        """Execute a command; return whether it requires a reply.

        Raises:
            CannotDo: nothing has changed.
        """
        match command:
            case Forward() | DummyStep() | Embed():
                try:
                    self._step(command)
                except ExpertsLost as error:  # the leader gets this error too
                    logger.info("%s", error)
            case PrepareGroup(position, size):
                self._prepare_group(GroupPosition(position, size))
            case JoinGroup(spec):
                self._join_group(spec)
            case LoadAdapter():
                self._load_adapter(command)
            case Logits(num_rows, adapters):
                model = self._loaded
                states = torch.empty(
                    num_rows, model.spec.hidden_size, dtype=model.dtype, device=model.device
                )
                model.logits(self._grid.shards.broadcast(states), self._rows(adapters))
            case ReadBlock(block_id):
                content = read_block(as_bytes(self._cache), block_id)
                part = torch.frombuffer(bytearray(content), dtype=torch.uint8)
                self._grid.shards.begin_send(part, 0).wait()
            case WriteBlock(block_id):
                part = torch.empty(self._block_bytes, dtype=torch.uint8)
                part = self._grid.shards.begin_receive(part, 0).wait()
                write_block(as_bytes(self._cache), block_id, part.numpy().tobytes())
            case Allocate(num_blocks, fingerprint):
                self._allocate(num_blocks)
                self._check(fingerprint)
            case BeginTrial(num_blocks):
                self._begin_trial(num_blocks)
            case EndTrial():
                self._end_trial()
            case _:
                self._operate(command)
        unanswered = Forward | DummyStep | Logits | Embed | LoadAdapter | ReadBlock | WriteBlock
        return not isinstance(command, unanswered)

    def _operate(self, command: Command) -> None:
        match command:
            case Sleep(level):
                self._cache = []
                self._holder.sleep(level)
            case TakeWeights():
                self._take_weights(command)
            case SettleWeights(revert):
                self._holder.settle(revert=revert)
            case StartProfile():
                self._steps.start_profile()
            case StopProfile(path):
                self._steps.stop_profile(self._rank_path(Path(path)))

    @property
    def _loaded(self) -> Decoder:
        assert self._holder.loaded is not None, "the worker is asleep"
        return self._holder.loaded.model

    def _load(
        self,
        in_group: GroupPosition | None,
        balance: ExpertBalance | None,
        sent: TensorFiles | None,
    ) -> LoadedModel:
        is_sharded = self._config.parallel.tensor_parallel_size > 1
        return load_model(
            self._config,
            self._device,
            logger.debug,
            in_group=in_group,
            shard=Shard(self._grid.shards) if is_sharded else None,
            stage=self._stage,
            balance=balance,
            sent=sent,
        )

    def _take_weights(self, command: TakeWeights) -> None:
        expected = announced_tensors(command.names, command.types, command.shapes)
        tensors = {
            name: self._grid.shards.broadcast(torch.empty_like(like, device=self._device)).cpu()
            for name, like in expected.items()
        }
        sent = SentTensors(tensors)
        try:
            self._holder.replace(sent)
        except Exception as error:
            raise CannotDo(f"worker {self._rank}: {error}") from error
        finally:
            sent.tensors = {}  # the loader would keep them alive

    def _prepare_group(self, in_group: GroupPosition) -> None:
        if self._engines is not None:
            self._engines.close()
            self._engines = None
            self._holder.share_experts(None)
        self._holder.move(in_group, self._grid.shards.size)

    def _join_group(self, spec: GroupSpec) -> None:
        shards = self._grid.shards
        try:
            self._engines = join_engines(spec, self._device, shard=shards.rank, shards=shards.size)
        except GroupBroken as error:
            raise CannotDo(str(error)) from error
        self._holder.share_experts(self._engines.processes)

    def _step(self, command: Forward | DummyStep | Embed) -> None:
        if isinstance(command, DummyStep):
            self._loaded.dummy_step()
            return
        if isinstance(command, Embed):
            self._loaded.embed(self._tensor(command.token_ids))
            return
        incoming = self._receives.popleft().wait() if self._stage > 0 else None
        states = self._loaded(self._tokens(command), self._cache, incoming)
        if self._is_last:
            return
        self._sends.append(self._grid.begin_send(states))
        if len(self._sends) > _MAX_PENDING_SENDS:
            self._sends.popleft().wait()

    def _allocate(self, num_blocks: int) -> None:
        model = self._holder.wake_up().model
        self._cache = allocate_cache(
            model.spec,
            num_blocks,
            self._config.cache.block_size,
            model.kv_format,
            model.device,
        )

    def _check(self, fingerprint: str) -> None:
        if self._holder.loaded is None or fingerprint != self._holder.loaded.fingerprint:
            raise CannotDo(
                f"worker {self._rank} on {socket.gethostname()} has loaded other weights than "
                f"the engine's own process: the files of {self._config.model.model} must be "
                "the same on all nodes"
            )

    @property
    def _block_bytes(self) -> int:
        model = self._loaded
        return bytes_per_block(model.spec, self._config.cache.block_size, model.kv_format)

    def _begin_trial(self, num_blocks: int) -> None:
        self._trial = MemoryTrial(self._device, self._processes)
        self._allocate(num_blocks)
        experts = self._loaded.expert_group
        in_group = self._holder.in_group
        if experts is not None and in_group is not None:
            experts.join(MirrorGroup(in_group.size * self._grid.shards.size))

    def _end_trial(self) -> None:
        trial, self._trial = self._trial, None
        assert trial is not None, "no trial has begun"
        peak = trial.peak(
            sum(layer.nbytes for layer in {id(each): each for each in self._cache}.values())
        )
        self._cache = []
        remaining = trial.remaining(peak, self._config.cache.gpu_memory_utilization)
        self.free_blocks = remaining // self._block_bytes
        self._holder.join_experts()

    def _rank_path(self, path: Path) -> Path:
        """Return this rank's variant of a file path that all ranks write."""
        suffixes = "".join(path.suffixes)
        return path.with_name(f"{path.name.removesuffix(suffixes)}-rank-{self._rank}{suffixes}")

    def _tokens(self, command: Forward) -> StepTokens:
        model = self._loaded
        rows = _unpacked(command.rows)
        token_ids, positions = map(self._tensor, (command.token_ids, command.positions))
        if len(positions) > len(token_ids):
            positions = positions.view(-1, len(token_ids))
        return StepTokens(
            token_ids=token_ids,
            positions=positions,
            slots=self._tensor(command.slots),
            rows=rows,
            plans=plans_of(model, rows, 0),
            adapters=self._rows(command.adapters),
            others=other_groups(model, rows, [self._tensor(each) for each in command.other_slots]),
            images=self._images(command),
        )

    def _images(self, command: Forward) -> ImageTokens | None:
        if not command.image_tokens:
            return None
        model, data = self._loaded, bytearray(command.image_embeddings)
        embeddings = torch.frombuffer(data, dtype=model.dtype).view(-1, model.spec.hidden_size)
        tokens, whole = self._tensor(command.image_tokens), None
        if (message := command.whole_images) is not None:
            queries, computed = map(self._tensor, (message.queries, message.computed))
            whole = whole_images(model, _unpacked(message.rows), queries, computed)
        return ImageTokens(tokens, embeddings.to(model.device), whole)

    def _rows(self, slots: bytes) -> AdapterRows | None:
        bank = self._loaded.adapters
        return None if bank is None or not slots else bank.rows(_integers(slots))

    def _load_adapter(self, command: LoadAdapter) -> None:
        """Load an adapter, whose matrices a stage's first shard gets by message and broadcasts."""
        model, broadcast = self._loaded, self._grid.shards.broadcast
        data = bytearray(command.data)
        stored = torch.frombuffer(data, dtype=model.dtype) if data else None
        first = 0

        def matrix(shape: tuple[int, int]) -> Tensor:
            nonlocal first
            if stored is None:
                return broadcast(torch.empty(*shape, dtype=model.dtype, device=model.device))
            begin, first = first, first + shape[0] * shape[1]
            return broadcast(stored[begin:first].view(shape).to(model.device))

        weights = {name: LowRank(matrix(a), matrix(b)) for name, (a, b) in command.shapes.items()}
        model.load_adapter(command.slot, weights)

    def _tensor(self, data: bytes) -> Tensor:
        return torch.from_numpy(_integers(data)).to(self._device)


def _integers(data: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(bytearray(data), np.int64)


def _unpacked(rows: Rows) -> AttentionRows:
    starts = _integers(rows.starts)
    tables = np.frombuffer(rows.block_tables, np.int32).reshape(len(starts), -1)
    return AttentionRows(
        starts=starts,
        counts=_integers(rows.counts),
        first_token=_integers(rows.first_token),
        block_tables=tables,
        block_size=rows.block_size,
        other_tables=tuple(
            np.frombuffer(each, np.int32).reshape(tables.shape) for each in rows.other_tables
        ),
    )


def commands(connection: socket.socket, prepare: Callable[[Command], None]) -> Iterator[Command]:
    """Yield commands until the leader closes the connection.

    Args:
        prepare: called with each command on arrival, possibly some commands before it is yielded.
    """
    reader = FrameReader(Command)
    pending: deque[Command] = deque()
    while True:
        while not pending or select.select([connection], [], [], 0)[0]:
            data = connection.recv(1 << 18)
            if not data:
                return
            for command in reader.feed(data):
                prepare(command)
                pending.append(command)
        yield pending.popleft()


def serve(launch: WorkerLaunch, connection: socket.socket) -> None:
    """Join the leader, load this rank's part, and execute commands until the connection closes.

    Raises:
        Exception: any error that prevents continuing.
    """
    set_threads(launch.config, launch.engines_on_node)
    device = take_device(launch.config, launch.rank)
    connection.sendall(pack_frame(WorkerReply(0, device=device.type)))
    layout = Layout.of(launch.config.parallel)
    grid = join_grid(
        GroupSpec(launch.address, launch.rank, launch.size, 0, GROUP_TIMEOUT),
        (layout.stages, layout.shards),
        layout.position(launch.rank),
        device,
    )
    worker = Worker(launch, grid, device)
    connection.sendall(pack_frame(WorkerReply(worker.free_blocks)))
    for command in commands(connection, worker.prepare):
        try:
            if worker.execute(command):
                connection.sendall(pack_frame(WorkerReply(worker.free_blocks)))
        except (CannotDo, OSError) as error:
            connection.sendall(pack_frame(WorkerReply(0, str(error))))


def run(launch: WorkerLaunch, lifeline: Lifeline) -> int:
    """Run a worker for the engine that started this process; return the exit code."""
    log = launch.config.log
    name_process(f"engine {launch.engine} worker {launch.rank}", log.log_level, log.log_format)
    # If a signal reaches the whole control group, the engine handles it and ends its workers.
    for signum in end_signals():
        signal.signal(signum, signal.SIG_IGN)
    lifeline.watch(on_lost=lambda: os._exit(0))
    try:
        with socket.socket(fileno=launch.commands) as connection:
            serve(launch, connection)
    except GroupBroken as error:
        lifeline.failed(str(error))  # the process that broke it reports the cause
        return 1
    except Exception as error:
        logger.exception("worker %d of engine %d cannot continue", launch.rank, launch.engine)
        lifeline.failed(f"{type(error).__name__}: {error}")
        return CANNOT_START if isinstance(error, ValueError) else 1
    return 0
