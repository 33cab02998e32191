"""Sizing of the KV cache across the processes of an engine."""

from dataclasses import dataclass

import msgspec
import torch

from engine.executor.leader import TeamLeader
from engine.executor.team_messages import BeginTrial, EndTrial
from engine.models.decoder import Decoder
from engine.models.heads.head import DraftHead
from engine.models.parallel.experts import MirrorGroup
from engine.runner.kv_memory import available_memory, bytes_per_block, count_blocks
from engine.runner.memory_profile import profiled_memory
from engine.scheduler.block_table import CacheShape
from engine.shared.config import EngineConfig


@dataclass(frozen=True)
class KvSizing:
    """Sizes the KV cache of an engine after its model is loaded."""

    config: EngineConfig
    device: torch.device
    processes: int
    """Number of processes that share this node's memory."""
    leader: TeamLeader | None = None
    """Leader of the processes with the other parts of the model."""
    draft: Decoder | DraftHead | None = None
    """The draft model or head, whose keys and values are stored in the same blocks."""
    kept_bytes: int = 0
    """Memory to reserve for later, besides the KV cache."""

    def num_blocks(self, model: Decoder, max_model_len: int, shape: CacheShape) -> int:
        """Return the number of KV cache blocks.

        Raises:
            NotEnoughMemory: it cannot hold one sequence.
        """
        block_bytes, cache = self._block_bytes(model), self.config.cache
        budget = cache.kv_cache_memory_bytes or (
            available_memory(self.device, self.processes) - self.kept_bytes
        )
        available = self._minimum_over_workers(max(0, budget) // block_bytes)
        is_given = cache.num_kv_blocks is not None or cache.kv_cache_memory_bytes is not None
        if self.device.type == "cuda" and not is_given:  # measure the largest step
            after_trial = self.blocks_after_trial(model, max_model_len)
            available = max(0, after_trial - self.kept_bytes // block_bytes)
        if cache.kv_cache_memory_bytes is not None:  # a stage with more layers has fewer blocks
            cache = msgspec.structs.replace(
                cache, kv_cache_memory_bytes=max(1, available * block_bytes)
            )
        return count_blocks(
            cache,
            block_bytes=block_bytes,
            max_model_len=max_model_len,
            max_num_seqs=self.config.scheduler.max_num_seqs,
            available_bytes=available * block_bytes,
            shape=shape,
        )

    def blocks_after_trial(self, model: Decoder, max_model_len: int) -> int:
        """Run the largest step in all processes of this engine; return the blocks that still fit.

        Other engines that hold experts are not connected yet: the step runs as if they did the same
        as this one. The KV cache must be empty.
        """
        leader, experts, parallel = self.leader, model.expert_group, self.config.parallel
        if experts is not None:
            size = parallel.data_parallel_size * parallel.tensor_parallel_size
            experts.join(MirrorGroup(size))
        try:
            free_bytes = profiled_memory(
                model,
                self.config.cache,
                self.config.scheduler,
                max_model_len,
                processes=self.processes,
                prepare=self._begin_trial,
                earlier=None if leader is None else leader.earlier(model),
            )
        finally:
            if experts is not None:
                experts.leave()
        if leader is not None:
            leader.team.send(EndTrial())
        return self._minimum_over_workers(free_bytes // self._block_bytes(model))

    def _begin_trial(self, num_blocks: int) -> None:
        if self.leader is not None:
            self.leader.call(BeginTrial(num_blocks))

    def _minimum_over_workers(self, num_blocks: int) -> int:
        others = [] if self.leader is None else self.leader.team.collect()
        return min([num_blocks, *(answer.free_blocks for answer in others)])

    def _block_bytes(self, model: Decoder) -> int:
        """Return the bytes of one block, in the KV caches of both models if there are two."""
        models = (model,) if self.draft is None else (model, self.draft)
        size = self.config.cache.block_size
        state_bytes = self.draft.state_bytes if isinstance(self.draft, DraftHead) else 0
        return state_bytes + sum(
            bytes_per_block(each.spec, size, each.kv_format) for each in models
        )
