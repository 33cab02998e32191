"""Runs a model that is divided over several processes: this one leads, workers follow."""

from collections.abc import Callable, Sequence
from pathlib import Path
from socket import socket

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.batch.batch import BatchPlan, BatchResult
from engine.batch.executor import CannotDo, ExecutorInfo, PendingResult
from engine.distributed.engines import EngineGroup
from engine.distributed.grid import Grid, join_grid
from engine.distributed.group import Transfer
from engine.distributed.spec import GroupBroken, GroupSpec
from engine.executor.in_process import InProcessExecutor
from engine.executor.layout import Layout
from engine.executor.loading import take_device
from engine.executor.team import Team, UnlikeWorkers
from engine.executor.team_messages import (
    Allocate,
    BeginTrial,
    Command,
    DummyStep,
    EndTrial,
    Forward,
    JoinGroup,
    LoadAdapter,
    Logits,
    PrepareGroup,
    Sleep,
    StartProfile,
    StopProfile,
)
from engine.executor.worker import GROUP_TIMEOUT
from engine.grammar.masks import GrammarTable
from engine.lora.store import AdapterStore
from engine.models.adapters import NO_ADAPTER, AdapterRows, AdapterWeights
from engine.models.attention.rows import AttentionRows
from engine.models.decoder import Decoder, ImageTokens, StepTokens
from engine.models.hf_config import read_spec
from engine.models.parallel.balance import ExpertBalance
from engine.models.parallel.experts import ExpertsLost
from engine.models.parallel.stages import Stage, divide_layers
from engine.runner.inputs import BatchRows
from engine.runner.model_runner import EarlierStages
from engine.shared.config import EngineConfig
from engine.shared.model_files import model_directory

IntArray = npt.NDArray[np.int64]


class TeamLeader:
    """Tells the workers what the model in this process is about to compute.

    Those of its own stage compute the same layers at the same time. Those of earlier stages are
    told first, and send what they have computed.
    """

    def __init__(
        self,
        team: Team,
        grid: Grid,
        layout: Layout,
        device: torch.device,
        stages: Sequence[Stage],
    ) -> None:
        self.group = grid.shards
        self._team = team
        self._grid = grid
        self._layout = layout
        self._stages = stages
        self._device = device

    def forward(self, step: StepTokens) -> None:
        """Have those of this stage run all its layers on these tokens."""
        if self._layout.shards == 1:
            return
        token_ids, positions, slots = map(_array, (step.token_ids, step.positions, step.slots))
        others = [_array(each.slots) for each in step.others]
        command = _forward(token_ids, positions, slots, step.rows, _slots(step.adapters), others)
        if self._layout.stages == 1:  # else the first stage has the embeddings
            command = _with_images(command, step.images)
        self._team.tell(command, self._layout.mates)

    def dummy_step(self) -> None:
        """Have them run the experts that they hold for other engines."""
        self._team.tell(DummyStep(), self._layout.mates)

    def logits(self, hidden: Tensor, adapters: AdapterRows | None) -> None:
        """Have those of this stage compute their part of the logits of these states."""
        self._team.tell(Logits(len(hidden), _slots(adapters)), self._layout.mates)
        self.group.broadcast(hidden.contiguous())

    def load_adapter(self, slot: int, weights: AdapterWeights) -> None:
        """Have those of this stage put their part of an adapter into a slot."""
        self._team.tell(LoadAdapter(slot, _shapes(weights)), self._layout.mates)
        for pair in weights.values():
            for matrix in pair:
                self.group.broadcast(matrix.to(self._device).contiguous())

    def earlier(self, model: Decoder) -> EarlierStages | None:
        """Return the stages before this one, whose part of the model is given; None if none."""
        if self._layout.stages == 1:
            return None
        return _TeamStages(self._team, self._grid, self._layout, self._stages[:-1], model)

    def min_blocks(self, own: int) -> int:
        """Wait until all have answered; return the fewest KV blocks that any has memory for."""
        return min(own, *(answer.free_blocks for answer in self._team.collect()))

    def begin_trial(self, num_blocks: int) -> None:
        """Have them watch their memory, with a KV cache of so many blocks."""
        self.call(BeginTrial(num_blocks))

    def end_trial(self) -> None:
        """Have them free that cache and answer how many blocks they have memory for."""
        self._team.tell(EndTrial())

    def allocate(self, num_blocks: int, fingerprint: str) -> None:
        """Have them hold their parts of these weights, and an empty KV cache of so many blocks."""
        self.call(Allocate(num_blocks, fingerprint))

    def call(self, command: Command) -> None:
        """Have them do something and wait until they have.

        Raises:
            CannotDo: one of them could not, for the reason given.
            WorkerFailed: one of them has died.
        """
        self._team.tell(command)
        self.wait()

    def wait(self) -> None:
        """Wait until all have answered what they were told; raises as `call` does."""
        refused = [answer for answer in self._team.collect() if answer.error]
        if refused:
            raise CannotDo(refused[0].error)


class _TeamStages:
    """The workers of all stages before the leader's."""

    def __init__(
        self, team: Team, grid: Grid, layout: Layout, stages: Sequence[Stage], model: Decoder
    ) -> None:
        self._team = team
        self._grid = grid
        self._layout = layout
        self._stages = stages
        self._width = model.spec.hidden_size
        self._dtype = model.dtype
        self._device = model.device

    def begin(self, rows: BatchRows, shape: AttentionRows, images: ImageTokens | None) -> Transfer:
        """Have them run their layers on these tokens; return the states that will come."""
        states = torch.empty(
            len(rows.token_ids), self._width, dtype=self._dtype, device=self._device
        )
        arriving = self._grid.begin_receive(states)
        adapters = rows.adapters.tobytes() if (rows.adapters != NO_ADAPTER).any() else b""
        command = _forward(
            rows.token_ids, rows.positions, rows.cache_slots, shape, adapters, rows.other_slots
        )
        self._team.tell(_with_images(command, images), self._layout.earlier)
        return arriving

    def load_adapter(self, slot: int, weights: AdapterWeights) -> None:
        """Have them put their part of an adapter into a slot, before what they are told next."""
        for number, stage in enumerate(self._stages):
            here = {name: pair for name, pair in weights.items() if stage.has(name)}
            first, *others = self._layout.ranks(number)
            command = LoadAdapter(slot, _shapes(here))
            self._team.tell(msgspec.structs.replace(command, data=_data(here)), [first])
            self._team.tell(command, others)


class _TeamStep:
    """A step that needs the workers too."""

    def __init__(self, pending: PendingResult, team: Team) -> None:
        self._pending = pending
        self._team = team

    def result(self) -> BatchResult:
        """Return the result.

        Raises:
            ExpertsLost: another engine has failed; this one can take the step again.
            WorkerFailed: a worker has died, of the reason given.
        """
        try:
            return self._pending.result()
        except ExpertsLost:
            raise
        except GroupBroken as error:
            raise self._team.failure() from error


class MultiProcessExecutor:
    """Executor whose model is divided over this process and the workers of a team.

    Plans, tokens and all else about requests stay in this process. Workers have a part of each
    layer, or other layers, and the KV cache of what they have.
    """

    def __init__(
        self,
        config: EngineConfig,
        team: Team,
        rank: int = 0,
        engines_on_node: int = 1,
        progress: Callable[[str], None] | None = None,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        """Load the model in all processes and size the KV cache; takes the team over.

        Args:
            on_failure: is told, in another thread, why the team is of no use any more.

        Raises:
            WorkerFailed: a worker cannot start.
            UnlikeWorkers: a worker has another kind of device, or other weights.
            ValueError: as `InProcessExecutor` does.
        """
        self._team = team
        self._grid: Grid | None = None
        self._on_failure = on_failure
        team.on_failure = self._failed
        try:
            layout, device = Layout.of(config.parallel), take_device(config)
            team.meet(device.type)
            self._grid = self._join(layout, device)
            self._leader = TeamLeader(team, self._grid, layout, device, _stages(config))
            self._inner = InProcessExecutor(
                config, rank, engines_on_node, progress, leader=self._leader
            )
        except BaseException as error:
            self._end_team()
            if isinstance(error, CannotDo):
                raise UnlikeWorkers(str(error)) from error
            raise

    @property
    def info(self) -> ExecutorInfo:
        """What was found while loading."""
        return self._inner.info

    @property
    def grammars(self) -> GrammarTable | None:
        """What makes draws follow grammars; None for a model without tokenizer."""
        return self._inner.grammars

    @property
    def adapters(self) -> AdapterStore[AdapterWeights] | None:
        """The adapters that plans may name; None if the model is served without."""
        return self._inner.adapters

    def submit(self, plan: BatchPlan) -> PendingResult:
        """Run a step in all processes.

        Raises:
            RuntimeError: the executor sleeps or was shut down.
        """
        return _TeamStep(self._inner.submit(plan), self._team)

    @property
    def expert_balance(self) -> ExpertBalance | None:
        """What is known of the experts' load; None without --enable-eplb."""
        return self._inner.expert_balance

    def prepare_group(self, position: int, size: int) -> None:
        """Hold the experts of this place in a group of `size` engines, in all processes.

        Raises:
            CannotDo: the model was loaded whole, or has no experts.
        """
        self._team.tell(PrepareGroup(position, size))
        self._inner.prepare_group(position, size)
        self._leader.wait()

    def join_group(self, spec: GroupSpec, listener: socket | None) -> EngineGroup:
        """Meet the processes of the other engines and take steps with them from now on.

        Raises:
            GroupBroken: not everybody came.
            WorkerFailed: a worker has died.
        """
        self._team.tell(JoinGroup(spec))
        try:
            group = self._inner.join_group(spec, listener)
        except GroupBroken:
            self._team.collect()
            raise
        try:
            self._leader.wait()
        except CannotDo as error:
            group.close()
            raise GroupBroken(str(error)) from error
        return group

    def sleep(self, level: int) -> None:
        """Free the KV cache, at level 2 the weights too, in all processes."""
        self._inner.sleep(level)
        self._leader.call(Sleep(level))

    def wake_up(self, *, kv_cache: bool = True) -> None:
        """Load the weights again if they are gone, and allocate the KV cache.

        Workers do both when the KV cache is allocated.

        Raises:
            CannotDo: the model has changed since the start.
        """
        self._inner.wake_up(kv_cache=kv_cache)

    def load_weights(self, model: str, revision: str | None) -> None:
        """Raise CannotDo."""
        raise CannotDo("weights are replaced in engines of one process only")

    def start_profile(self) -> None:
        """Begin to record what steps do, in all processes.

        Raises:
            CannotDo: a profile is being recorded.
        """
        self._inner.start_profile()
        self._leader.call(StartProfile())

    def stop_profile(self, path: Path) -> None:
        """End the recording; workers put `-rank-N` into the names of their traces.

        Raises:
            CannotDo: nothing is being recorded.
            OSError: the trace cannot be written.
        """
        self._inner.stop_profile(path)
        self._leader.call(StopProfile(str(path)))

    def shutdown(self) -> None:
        """End the workers and free the model and the KV cache."""
        self._inner.shutdown()
        self._end_team()

    def _join(self, layout: Layout, device: torch.device) -> Grid:
        spec = GroupSpec(self._team.address, 0, self._team.size, 0, GROUP_TIMEOUT)
        shape = layout.stages, layout.shards
        try:
            return join_grid(spec, shape, layout.place(0), device, self._team.listener)
        except GroupBroken as error:
            raise self._team.failure() from error

    def _failed(self, reason: str) -> None:
        if self._grid is not None:
            self._grid.abort()
        if self._on_failure is not None:
            self._on_failure(reason)

    def _end_team(self) -> None:
        if self._grid is not None:
            self._grid.close()
        self._team.close()


def _slots(adapters: AdapterRows | None) -> bytes:
    return b"" if adapters is None else _array(adapters.slots).tobytes()


def _stages(config: EngineConfig) -> list[Stage]:
    num_layers = read_spec(model_directory(config.model, weights=False)).num_layers
    parallel = config.parallel
    return divide_layers(num_layers, parallel.pipeline_parallel_size, parallel.layers_of_stages)


def _shapes(weights: AdapterWeights) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
    return {
        name: ((len(pair.a), pair.a.shape[1]), (len(pair.b), pair.b.shape[1]))
        for name, pair in weights.items()
    }


def _data(weights: AdapterWeights) -> bytes:
    matrices = (matrix for pair in weights.values() for matrix in pair)
    return b"".join(map(_bytes, matrices))


def _bytes(tensor: Tensor) -> bytes:
    content: bytes = tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return content


def _with_images(command: Forward, images: ImageTokens | None) -> Forward:
    """Return the command for a step of which some tokens may stand for images."""
    if images is None:
        return command
    return msgspec.structs.replace(
        command,
        image_tokens=_array(images.tokens).tobytes(),
        image_embeddings=_bytes(images.embeddings),
    )


def _forward(
    token_ids: IntArray,
    positions: IntArray,
    slots: IntArray,
    rows: AttentionRows,
    adapters: bytes = b"",
    other_slots: Sequence[IntArray] = (),
) -> Forward:
    return Forward(
        token_ids=token_ids.tobytes(),
        positions=positions.tobytes(),
        slots=slots.tobytes(),
        starts=rows.starts.tobytes(),
        counts=rows.counts.tobytes(),
        first_token=rows.first_token.tobytes(),
        block_tables=rows.block_tables.tobytes(),
        block_size=rows.block_size,
        adapters=adapters,
        other_slots=tuple(each.tobytes() for each in other_slots),
        other_tables=tuple(each.tobytes() for each in rows.other_tables),
    )


def _array(tensor: Tensor) -> IntArray:
    array: IntArray = tensor.cpu().numpy()
    return array
