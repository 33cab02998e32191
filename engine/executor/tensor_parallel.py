"""Runs a model that is cut over several processes: this one leads, workers follow."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from engine.distributed.group import Group, join_group
from engine.distributed.spec import GroupBroken, GroupSpec
from engine.executor.in_process import InProcessExecutor
from engine.executor.interface import CannotDo, ExecutorInfo, PendingResult
from engine.executor.loading import device_for
from engine.executor.team import Team
from engine.executor.team_messages import (
    Allocate,
    BeginTrial,
    Command,
    EndTrial,
    Forward,
    Logits,
    Sleep,
    StartProfile,
    StopProfile,
)
from engine.executor.worker import GROUP_TIMEOUT
from engine.grammar.masks import GrammarTable
from engine.models.decoder import StepTokens
from engine.scheduler.batch import BatchPlan, BatchResult
from engine.shared.config import EngineConfig


class TeamLeader:
    """Tells the workers what the model in this process is about to compute."""

    def __init__(self, team: Team, group: Group) -> None:
        self.group = group
        self._team = team

    def forward(self, step: StepTokens) -> None:
        """Have them run all layers on these tokens."""
        self._team.tell(
            Forward(
                token_ids=_bytes(step.token_ids),
                positions=_bytes(step.positions),
                slots=_bytes(step.slots),
                starts=step.rows.starts.tobytes(),
                counts=step.rows.counts.tobytes(),
                first_token=step.rows.first_token.tobytes(),
                block_tables=step.rows.block_tables.tobytes(),
                block_size=step.rows.block_size,
            )
        )

    def logits(self, hidden: Tensor) -> None:
        """Have them compute their part of the logits of these states."""
        self._team.tell(Logits(len(hidden)))
        self.group.broadcast(hidden.contiguous())

    def min_blocks(self, own: int) -> int:
        """Wait until all have answered; return the fewest KV blocks that any has memory for."""
        return min(own, *(answer.free_blocks for answer in self._team.collect()))

    def begin_trial(self, num_blocks: int) -> None:
        """Have them watch their memory, with a KV cache of so many blocks."""
        self.call(BeginTrial(num_blocks))

    def end_trial(self) -> None:
        """Have them free that cache and answer how many blocks they have memory for."""
        self._team.tell(EndTrial())

    def allocate(self, num_blocks: int) -> None:
        """Have them hold their weights, and an empty KV cache of so many blocks."""
        self.call(Allocate(num_blocks))

    def call(self, command: Command) -> None:
        """Have them do something and wait until they have.

        Raises:
            CannotDo: one of them could not, for the reason given.
            WorkerFailed: one of them has died.
        """
        self._team.tell(command)
        refused = [answer for answer in self._team.collect() if answer.error]
        if refused:
            raise CannotDo(refused[0].error)


class _TeamStep:
    """A step that needs the workers too."""

    def __init__(self, pending: PendingResult, team: Team) -> None:
        self._pending = pending
        self._team = team

    def result(self) -> BatchResult:
        """Return the result; raises WorkerFailed with what a worker has died of."""
        try:
            return self._pending.result()
        except GroupBroken as error:
            raise self._team.failure() from error


class TensorParallelExecutor:
    """Executor whose model is cut over this process and the workers of a team.

    Plans, tokens and all else about requests stay in this process. Workers compute the same layers
    on their part of the weights and of the KV cache.
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
            ValueError: as `InProcessExecutor` does.
        """
        self._team = team
        self._group: Group | None = None
        self._on_failure = on_failure
        team.on_failure = self._failed
        try:
            team.collect()
            self._group = self._join(device_for(config))
            self._leader = TeamLeader(team, self._group)
            self._inner = InProcessExecutor(
                config, rank, engines_on_node, progress, leader=self._leader
            )
        except BaseException:
            self._end_team()
            raise

    @property
    def info(self) -> ExecutorInfo:
        """What was found while loading."""
        return self._inner.info

    @property
    def grammars(self) -> GrammarTable | None:
        """What makes draws follow grammars; None for a model without tokenizer."""
        return self._inner.grammars

    def submit(self, plan: BatchPlan) -> PendingResult:
        """Run a step in all processes.

        Raises:
            RuntimeError: the executor sleeps or was shut down.
        """
        return _TeamStep(self._inner.submit(plan), self._team)

    def sleep(self, level: int) -> None:
        """Free the KV cache, at level 2 and on accelerators the weights too, in all processes."""
        self._inner.sleep(level)
        self._leader.call(Sleep(level))

    def wake_up(self) -> None:
        """Load the weights again if they are gone, and allocate the KV cache.

        Raises:
            CannotDo: the model has changed since the start.
        """
        self._inner.wake_up()

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
        """End the workers, free the model and the KV cache."""
        self._inner.shutdown()
        self._end_team()

    def _join(self, device: torch.device) -> Group:
        spec = GroupSpec(self._team.address, 0, self._team.size, 0, GROUP_TIMEOUT)
        try:
            return join_group(spec, device, self._team.listener)
        except GroupBroken as error:
            raise self._team.failure() from error

    def _failed(self, reason: str) -> None:
        if self._group is not None:
            self._group.abort()
        if self._on_failure is not None:
            self._on_failure(reason)

    def _end_team(self) -> None:
        if self._group is not None:
            self._group.close()
        self._team.close()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
