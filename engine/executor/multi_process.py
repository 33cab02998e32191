"""Runs a model that is divided over several processes: this one leads, workers follow."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from socket import socket

import torch

from engine.batch.batch import BatchPlan, BatchResult
from engine.batch.executor import CannotDo, PendingResult
from engine.distributed.engines import EngineGroup
from engine.distributed.grid import Grid, join_grid
from engine.distributed.spec import GroupBroken, GroupSpec
from engine.executor.in_process import InProcessExecutor
from engine.executor.layout import Layout
from engine.executor.leader import TeamLeader
from engine.executor.loading import take_device
from engine.executor.team import Team, UnlikeWorkers
from engine.executor.team_messages import (
    JoinGroup,
    PrepareGroup,
    Sleep,
    StartProfile,
    StopProfile,
)
from engine.executor.worker import GROUP_TIMEOUT
from engine.models.hf_config import read_spec
from engine.models.parallel.experts import ExpertsLost
from engine.models.parallel.stages import Stage, divide_layers
from engine.shared.config import EngineConfig
from engine.shared.model_files import model_directory


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


class MultiProcessExecutor(InProcessExecutor):
    """Executor whose model is divided over this process and the workers of a team.

    Plans, tokens and all else about requests stay in this process. Workers have a part of each
    layer, or other layers, and the KV cache of what they have.
    """

    _leader: TeamLeader

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
            leader = TeamLeader(team, self._grid, layout, device, _stages(config))
            super().__init__(config, rank, engines_on_node, progress, leader)
        except BaseException as error:
            self._end_team()
            if isinstance(error, CannotDo):
                raise UnlikeWorkers(str(error)) from error
            raise

    def submit(self, plan: BatchPlan) -> PendingResult:
        """Run a step in all processes.

        Raises:
            RuntimeError: the executor sleeps or was shut down.
        """
        return _TeamStep(super().submit(plan), self._team)

    def prepare_group(self, position: int, size: int) -> None:
        """Hold the experts of this place in a group of `size` engines, in all processes."""
        self._team.tell(PrepareGroup(position, size))
        super().prepare_group(position, size)
        self._leader.wait()

    def join_group(self, spec: GroupSpec, listener: socket | None) -> EngineGroup:
        """Meet the processes of the other engines and take steps with them from now on.

        Raises:
            GroupBroken: not everybody came.
            WorkerFailed: a worker has died.
        """
        self._team.tell(JoinGroup(spec))
        try:
            group = super().join_group(spec, listener)
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
        """Free the KV cache, at level 2 the weights too, in all processes.

        Workers have both again when `wake_up` allocates the KV cache.
        """
        super().sleep(level)
        self._leader.call(Sleep(level))

    def load_weights(self, model: str, revision: str | None) -> None:
        """Raise CannotDo."""
        raise CannotDo("weights are replaced in engines of one process only")

    @property
    def block_format(self) -> str:
        """Shape and type of a process's part of a block, and how many parts there are."""
        return f"{self._leader.group.size} parts of {super().block_format}"

    def read_block(self, block_id: int) -> bytes:
        """Return what a block holds, the processes' parts one after the other.

        It waits for the steps in flight.

        Raises:
            WorkerFailed: a worker has died.
        """
        content = super().read_block(block_id)
        return self._between_steps(partial(self._leader.read_block, block_id, content))

    def write_block(self, block_id: int, content: bytes) -> None:
        """Replace what a block holds in all processes; waits and raises as `read_block` does."""
        own = self._between_steps(partial(self._leader.write_block, block_id, content))
        super().write_block(block_id, own)

    def start_profile(self) -> None:
        """Begin to record what steps do, in all processes.

        Raises:
            CannotDo: a profile is being recorded.
        """
        super().start_profile()
        self._leader.call(StartProfile())

    def stop_profile(self, path: Path) -> None:
        """End the recording; workers put `-rank-N` into the names of their traces."""
        super().stop_profile(path)
        self._leader.call(StopProfile(str(path)))

    def shutdown(self) -> None:
        """End the workers and free the model and the KV cache."""
        super().shutdown()
        self._end_team()

    def _between_steps(self, exchange: Callable[[], bytes]) -> bytes:
        """Call a function that tells the workers something, which steps do too."""
        try:
            return self._steps.call(exchange)
        except GroupBroken as error:
            raise self._team.failure() from error

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


def _stages(config: EngineConfig) -> list[Stage]:
    num_layers = read_spec(model_directory(config.model, weights=False)).num_layers
    parallel = config.parallel
    return divide_layers(num_layers, parallel.pipeline_parallel_size, parallel.layers_of_stages)
