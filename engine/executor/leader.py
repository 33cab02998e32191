"""The leader's side of the protocol between an engine's process and its workers."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.batch.batch import BatchResult
from engine.batch.executor import CannotDo, PendingResult
from engine.batch.weight_transfer import SentTensors
from engine.distributed.grid import join_grid
from engine.distributed.group import Transfer
from engine.distributed.spec import GroupBroken, GroupSpec
from engine.executor.layout import Layout
from engine.executor.team import Team
from engine.executor.team_messages import (
    GROUP_TIMEOUT,
    Command,
    DummyStep,
    Embed,
    Forward,
    LoadAdapter,
    Logits,
    ReadBlock,
    Rows,
    TakeWeights,
    Whole,
    WriteBlock,
)
from engine.models.adapters import NO_ADAPTER, AdapterRows, AdapterWeights
from engine.models.attention.rows import AttentionRows
from engine.models.decoder import Decoder
from engine.models.hf_config import read_spec
from engine.models.parallel.experts import ExpertsLost
from engine.models.parallel.stages import divide_layers
from engine.models.step import ImageTokens, StepTokens
from engine.runner.inputs import BatchRows
from engine.runner.model_runner import EarlierStages
from engine.shared.config import EngineConfig
from engine.shared.model_files import model_directory

IntArray = npt.NDArray[np.int64]


class TeamLeader:
    """Sends the workers what the model in this process is about to compute.

    Workers of its own stage compute the same layers at the same time. Those of earlier stages get
    their commands first, and send the hidden states that they compute.
    """

    def __init__(self, config: EngineConfig, team: Team, device: torch.device) -> None:
        """Connect to the workers.

        Raises:
            WorkerFailed: a worker cannot start.
            MismatchedWorkers: a worker has another kind of device.
        """
        self.team = team
        self._device = device
        self.layout = layout = Layout.of(config.parallel)
        num_layers = read_spec(model_directory(config.model, weights=False)).num_layers
        self.stages = divide_layers(num_layers, layout.stages, config.parallel.layers_of_stages)
        team.wait_until_loaded(device.type)
        spec = GroupSpec(team.address, 0, team.size, 0, GROUP_TIMEOUT)
        shape = layout.stages, layout.shards
        try:
            self.grid = join_grid(spec, shape, layout.position(0), device, team.listener)
        except GroupBroken as error:
            raise team.failure() from error
        team.abort = self.grid.abort
        self.group = self.grid.shards

    def close(self) -> None:
        """Terminate the workers; idempotent."""
        self.grid.close()
        self.team.close()

    def forward(self, step: StepTokens) -> None:
        """Have the workers of this stage run all its layers on these tokens."""
        if self.layout.shards == 1:
            return
        token_ids, positions, slots = map(_array, (step.token_ids, step.positions, step.slots))
        others = [_array(each.slots) for each in step.others]
        images = step.images
        if self.layout.stages > 1 and (images is None or images.whole is None):
            images = None  # only the first stage needs them
        adapters = _slots(step.adapters)
        command = _forward(token_ids, positions, slots, step.rows, adapters, others, images)
        self.team.send(command, self.layout.stage_workers)

    def dummy_step(self) -> None:
        """Have them run their experts for other engines."""
        self.team.send(DummyStep(), self.layout.stage_workers)

    def logits(self, hidden: Tensor, adapters: AdapterRows | None) -> None:
        """Have the workers of this stage compute their part of the logits of these states."""
        self.team.send(Logits(len(hidden), _slots(adapters)), self.layout.stage_workers)
        self.group.broadcast(hidden.contiguous())

    def embed(self, token_ids: Tensor) -> None:
        """Have the workers of this stage look up tokens in their part of the embedding."""
        self.team.send(Embed(_array(token_ids).tobytes()), self.layout.stage_workers)

    def load_adapter(self, slot: int, weights: AdapterWeights) -> None:
        """Have the workers of this stage load their part of an adapter into a slot."""
        self.team.send(LoadAdapter(slot, _shapes(weights)), self.layout.stage_workers)
        for pair in weights.values():
            for matrix in pair:
                self.group.broadcast(matrix.to(self._device).contiguous())

    def take_weights(self, sent: SentTensors) -> None:
        """Have the workers of this stage load their part of a trainer's weights, keeping the old.

        Raises:
            CannotDo: a worker cannot load them.
            WorkerFailed: a worker has died.
        """
        names, tensors = list(sent.tensors), list(sent.tensors.values())
        types = [str(each.dtype).removeprefix("torch.") for each in tensors]
        command = TakeWeights(names, types, [list(each.shape) for each in tensors])
        self.team.send(command, self.layout.stage_workers)
        for each in tensors:
            self.group.broadcast(each.to(self._device).contiguous())
        self.wait()

    def read_block(self, block_id: int, content: bytes) -> bytes:
        """Return the contents of a KV block from all processes of this stage, in rank order."""
        self.team.send(ReadBlock(block_id), self.layout.stage_workers)
        receives = [
            self.group.begin_receive(torch.empty(len(content), dtype=torch.uint8), rank)
            for rank in self.layout.stage_workers
        ]
        return content + b"".join([_bytes(each.wait()) for each in receives])

    def write_block(self, block_id: int, content: bytes) -> bytes:
        """Have them overwrite their parts of a KV block; return this process's part."""
        self.team.send(WriteBlock(block_id), self.layout.stage_workers)
        parts = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        first, *others = parts.chunk(self.group.size)
        sends = [self.group.begin_send(part, rank) for rank, part in enumerate(others, 1)]
        for each in sends:
            each.wait()
        return _bytes(first)

    def earlier(self, model: Decoder) -> EarlierStages | None:
        """Return the earlier stages, given this one's part of the model; None if there are none."""
        return None if self.layout.stages == 1 else _TeamStages(self, model)

    def call(self, command: Command) -> None:
        """Have all workers execute a command and wait until they have.

        Raises:
            CannotDo: a worker could not, for the reason given.
            WorkerFailed: a worker has died.
        """
        self.team.send(command)
        self.wait()

    def wait(self) -> None:
        """Wait for the replies of all workers; raises as `call` does."""
        refused = [answer for answer in self.team.collect() if answer.error]
        if refused:
            raise CannotDo(refused[0].error)


class TeamStep:
    """A step that involves the workers."""

    def __init__(self, pending: PendingResult, team: Team) -> None:
        self._pending = pending
        self._team = team

    def result(self) -> BatchResult:
        """Return the result.

        Raises:
            ExpertsLost: another engine has failed; this one can repeat the step.
            WorkerFailed: a worker has died, for the reason given.
        """
        try:
            return self._pending.result()
        except ExpertsLost:
            raise
        except GroupBroken as error:
            raise self._team.failure() from error


class _TeamStages(NamedTuple):
    """The workers of all stages before the leader's."""

    leader: TeamLeader
    model: Decoder
    """The leader's part of the model."""

    def begin(self, rows: BatchRows, shape: AttentionRows, images: ImageTokens | None) -> Transfer:
        """Have them run their layers on these tokens; return the transfer of the hidden states."""
        leader, model = self
        size = len(rows.token_ids), model.spec.hidden_size
        states = torch.empty(size, dtype=model.dtype, device=model.device)
        receive = leader.grid.begin_receive(states)
        adapters = rows.adapters.tobytes() if (rows.adapters != NO_ADAPTER).any() else b""
        arrays = rows.token_ids, rows.turns, rows.cache_slots
        command = _forward(*arrays, shape, adapters, rows.other_slots, images)
        leader.team.send(command, range(leader.layout.shards, leader.layout.size))
        return receive

    def load_adapter(self, slot: int, weights: AdapterWeights) -> None:
        """Have them load their part of an adapter into a slot, before any later command."""
        leader = self.leader
        for number, stage in enumerate(leader.stages[:-1]):
            local = {name: pair for name, pair in weights.items() if stage.has(name)}
            first, *others = leader.layout.ranks(number)
            data = b"".join(_bytes(matrix) for pair in local.values() for matrix in pair)
            leader.team.send(LoadAdapter(slot, _shapes(local), data), [first])
            leader.team.send(LoadAdapter(slot, _shapes(local)), others)


def _slots(adapters: AdapterRows | None) -> bytes:
    return b"" if adapters is None else _array(adapters.slots).tobytes()


def _shapes(weights: AdapterWeights) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
    return {
        name: ((len(pair.a), pair.a.shape[1]), (len(pair.b), pair.b.shape[1]))
        for name, pair in weights.items()
    }


def _bytes(tensor: Tensor) -> bytes:
    content: bytes = tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return content


def _forward(
    token_ids: IntArray,
    positions: IntArray,
    slots: IntArray,
    rows: AttentionRows,
    adapters: bytes,
    other_slots: Sequence[IntArray],
    images: ImageTokens | None,
) -> Forward:
    whole = None if images is None else images.whole
    return Forward(
        token_ids=token_ids.tobytes(),
        positions=positions.tobytes(),
        slots=slots.tobytes(),
        rows=_packed(rows),
        adapters=adapters,
        other_slots=tuple(each.tobytes() for each in other_slots),
        image_tokens=b"" if images is None else _array(images.tokens).tobytes(),
        image_embeddings=b"" if images is None else _bytes(images.embeddings),
        whole_images=None
        if whole is None
        else Whole(
            _array(whole.queries).tobytes(), _array(whole.computed).tobytes(), _packed(whole.rows)
        ),
    )


def _packed(rows: AttentionRows) -> Rows:
    return Rows(
        starts=rows.starts.tobytes(),
        counts=rows.counts.tobytes(),
        first_token=rows.first_token.tobytes(),
        block_tables=rows.block_tables.tobytes(),
        block_size=rows.block_size,
        other_tables=tuple(each.tobytes() for each in rows.other_tables),
    )


def _array(tensor: Tensor) -> IntArray:
    array: IntArray = tensor.cpu().numpy()
    return array
