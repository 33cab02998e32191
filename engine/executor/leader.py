"""What an engine's own process tells the processes that hold the model's other parts."""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.batch.executor import CannotDo
from engine.batch.weight_transfer import SentTensors
from engine.distributed.grid import Grid
from engine.distributed.group import Transfer
from engine.executor.layout import Layout
from engine.executor.team import Team
from engine.executor.team_messages import (
    Allocate,
    BeginTrial,
    Command,
    DummyStep,
    EndTrial,
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
from engine.models.parallel.stages import Stage
from engine.models.step import ImageTokens, StepTokens
from engine.runner.inputs import BatchRows
from engine.runner.model_runner import EarlierStages

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
        images = step.images
        if self._layout.stages == 1 or (images is not None and images.whole is not None):
            command = _with_images(command, images)  # else the first stage alone needs them
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

    def take_weights(self, sent: SentTensors) -> None:
        """Have those of this stage load their part of weights of a trainer, beside their own.

        Raises:
            CannotDo: one of them cannot.
            WorkerFailed: one of them has died.
        """
        names, tensors = list(sent.tensors), list(sent.tensors.values())
        types = [str(each.dtype).removeprefix("torch.") for each in tensors]
        command = TakeWeights(names, types, [list(each.shape) for each in tensors])
        self._team.tell(command, self._layout.mates)
        for each in tensors:
            self.group.broadcast(each.to(self._device).contiguous())
        self.wait()

    def read_block(self, block_id: int, own: bytes) -> bytes:
        """Return what a KV block holds in all processes of this stage, in their order."""
        self._team.tell(ReadBlock(block_id), self._layout.mates)
        coming = [
            self.group.begin_receive(torch.empty(len(own), dtype=torch.uint8), rank)
            for rank in self._layout.mates
        ]
        return own + b"".join([_bytes(each.wait()) for each in coming])

    def write_block(self, block_id: int, content: bytes) -> bytes:
        """Have them replace what a KV block holds by their parts; return that of this process."""
        self._team.tell(WriteBlock(block_id), self._layout.mates)
        parts = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        own, *others = parts.chunk(self.group.size)
        leaving = [self.group.begin_send(part, rank) for rank, part in enumerate(others, 1)]
        for each in leaving:
            each.wait()
        return _bytes(own)

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
            rows.token_ids, rows.turns, rows.cache_slots, shape, adapters, rows.other_slots
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


def _slots(adapters: AdapterRows | None) -> bytes:
    return b"" if adapters is None else _array(adapters.slots).tobytes()


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
    whole = images.whole
    return msgspec.structs.replace(
        command,
        image_tokens=_array(images.tokens).tobytes(),
        image_embeddings=_bytes(images.embeddings),
        whole_images=whole
        and Whole(
            _array(whole.queries).tobytes(), _array(whole.computed).tobytes(), _packed(whole.rows)
        ),
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
        rows=_packed(rows),
        adapters=adapters,
        other_slots=tuple(each.tobytes() for each in other_slots),
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
