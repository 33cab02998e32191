"""CUDA graphs of decode steps: one replay instead of hundreds of kernel launches."""

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.models.attention.cuda import CudaAttention, KernelAttention, TilePlan
from engine.models.attention.rows import AttentionRows, IntArray
from engine.models.decoder import Decoder
from engine.models.device_copies import refill, to_device
from engine.models.step import StepTokens
from engine.runner.inputs import BatchRows

_SMALL_SIZES = (1, 2, 4)
_STRIDE = 8
_LARGEST = 256


class PaddedDecode(msgspec.Struct, frozen=True):
    """The arrays of a decode step, padded with rows that access a dedicated scratch block."""

    token_ids: IntArray
    positions: IntArray
    cache_slots: IntArray
    num_keys: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    """[size, blocks of the longest sequence]"""


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the batch sizes to record: few small ones, then every eighth."""
    largest = min(max_num_seqs, _LARGEST)
    sizes = {size for size in _SMALL_SIZES if size < largest}
    return (*sorted(sizes | set(range(_STRIDE, largest, _STRIDE))), largest)


def padded_size(num_rows: int, sizes: Sequence[int]) -> int | None:
    """Return the smallest size of at least `num_rows`; None if all are smaller."""
    index = bisect_left(sizes, num_rows)
    return sizes[index] if index < len(sizes) else None


def pad_decode(
    rows: BatchRows, shape: AttentionRows, *, size: int, width: int, scratch_block: int
) -> PaddedDecode:
    """Pad a step of one-token rows to `size` rows and `width` blocks.

    Args:
        rows: the rows to compute.
        shape: the same for attention, one row per token.
        size: rows of the recorded step, at least the number of rows.
        width: blocks of its block tables.
        scratch_block: block that padding rows read and write.
    """
    count = len(rows.token_ids)
    padding = size - count
    block_tables = np.full((size, width), scratch_block, np.int32)
    block_tables[:count, : shape.block_tables.shape[1]] = shape.block_tables
    scratch_slot = scratch_block * shape.block_size
    return PaddedDecode(
        token_ids=np.pad(rows.token_ids, (0, padding)),
        positions=np.pad(rows.turns, (0, padding)),
        cache_slots=np.pad(rows.cache_slots, (0, padding), constant_values=scratch_slot),
        num_keys=np.pad(rows.positions + 1, (0, padding), constant_values=1).astype(np.int32),
        block_tables=block_tables,
    )


logger = logging.getLogger(__name__)

_WARM_UPS = 2
"""Runs before a recording, in which libraries choose algorithms and allocate workspaces."""


class _Graph(msgspec.Struct, frozen=True):
    graph: torch.cuda.CUDAGraph
    step: StepTokens
    plan: TilePlan
    hidden: Tensor


def recordable_attention(model: Decoder, block_size: int) -> KernelAttention | None:
    """Return the attention if steps can be recorded; stock attention depends on lengths."""
    attention = model.attention
    if not isinstance(attention, CudaAttention):
        return None
    if not model.is_recordable or len(model.windows) > 1:
        return None
    chosen = attention.for_blocks(block_size)
    return chosen if isinstance(chosen, KernelAttention) else None


@dataclass(eq=False)
class DecodeGraphs:
    """Decode steps, recorded per size on first use."""

    model: Decoder
    attention: KernelAttention
    cache: list[Tensor]
    _: KW_ONLY
    max_num_seqs: int
    max_model_len: int
    scratch_block: int
    """A block of the cache that no sequence uses."""

    def __post_init__(self) -> None:
        self._block_size = self.cache[0].shape[1]
        self._width = -(-(self.max_model_len + 1) // self._block_size)
        self._sizes = graph_sizes(self.max_num_seqs)
        self._graphs: dict[int, _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self.model.device)  # type: ignore[no-untyped-call]
        """Recording requires a stream other than the current one."""

    def run(self, rows: BatchRows, shape: AttentionRows) -> Tensor | None:
        """Return the final states [tokens, hidden] of a step, None if it cannot be replayed."""
        count = len(rows.token_ids)
        size = padded_size(count, self._sizes)
        if size is None or len(shape.counts) != count:
            return None
        padded = pad_decode(
            rows, shape, size=size, width=self._width, scratch_block=self.scratch_block
        )
        graph = self._graphs.get(size)
        if graph is None:
            graph = self._graphs[size] = self._record(padded, shape)
        else:
            refill(graph.step.token_ids, padded.token_ids)
            refill(graph.step.positions, padded.positions)
            refill(graph.step.slots, padded.cache_slots)
            self.attention.replan(graph.plan, padded.num_keys, padded.block_tables)
        graph.graph.replay()
        return graph.hidden[:count]

    def _record(self, padded: PaddedDecode, shape: AttentionRows) -> _Graph:
        step, plan = self._inputs(padded, shape)
        current = torch.cuda.current_stream(self.model.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):  # cache writes are repeated by the replay
                self.model(step, self.cache)
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Graphs run sequentially, so they share their memory pool.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            hidden = self.model(step, self.cache)
        logger.debug("recorded a decode step of %d rows", len(padded.token_ids))
        return _Graph(graph, step, plan, hidden)

    def _inputs(self, padded: PaddedDecode, shape: AttentionRows) -> tuple[StepTokens, TilePlan]:
        """Return the tensors that the recording reads at every replay."""
        device = self.model.device
        plan = self.attention.plan_decodes(padded.num_keys, padded.block_tables, self.max_model_len)
        step = StepTokens(
            token_ids=to_device(padded.token_ids, device),
            positions=to_device(padded.positions, device),
            slots=to_device(padded.cache_slots, device),
            rows=shape,
            plans={
                window: msgspec.structs.replace(plan, window=window)
                for window in self.model.windows[0]
            },
        )
        return step, plan
