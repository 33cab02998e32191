"""Measures the peak memory of a step by running the largest one."""

from collections.abc import Callable

import torch

from engine.batch.batch import BatchPlan, SlotBlocks, SlotStart
from engine.models.decoder import Decoder
from engine.runner.kv_memory import available_memory, bytes_per_block
from engine.runner.model_runner import EarlierStages, ModelRunner
from engine.shared.config import CacheConfig, SchedulerConfig
from engine.shared.messages import SamplingParams


def heaviest_plan(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    block_size: int,
    vocab_size: int = 1,
) -> tuple[BatchPlan, int]:
    """Return a step with the maximum tokens and samples, and the number of KV blocks it needs.

    Its token ids vary, so that they are routed to different experts.
    """
    rows = min(max_num_seqs, max_num_batched_tokens)
    share, rest = divmod(max_num_batched_tokens, rows)
    counts = [min(share + (row < rest), max_model_len) for row in range(rows)]
    sampling = SamplingParams(max_tokens=1, seed=0, top_p=0.9, frequency_penalty=0.1)
    starting, blocks, used = [], [], 0
    for slot, count in enumerate(counts):
        needed = -(-count // block_size)
        starting.append(SlotStart(slot, [i % vocab_size for i in range(count)], count, sampling))
        blocks.append(SlotBlocks(slot, 0, list(range(used, used + needed))))
        used += needed
    order = sorted(range(rows), key=lambda row: counts[row] > 1)
    plan = BatchPlan(
        step=0,
        starting=starting,
        blocks=blocks,
        slots=order,
        starts=[0] * rows,
        counts=[counts[row] for row in order],
        samples=[True] * rows,
    )
    return plan, used


def free_for_cache(*, total: int, utilization: float, peak: int, others: int) -> int:
    """Return the bytes left for the KV cache.

    Args:
        total: memory of the device.
        utilization: share of it that this engine may use.
        peak: peak of weights and the largest step.
        others: other usage, e.g. by the driver and other processes.
    """
    return max(0, int(total * utilization) - peak - others)


class MemoryTrial:
    """Measures one process's memory around the largest step; on a CPU only free memory."""

    def __init__(self, device: torch.device, processes: int) -> None:
        """Start measuring; `processes` share the node's memory."""
        self._device = device
        self._processes = processes
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)

    def peak(self, own_cache: int) -> int:
        """Return the peak of allocated bytes since the start, without the trial's KV cache."""
        if self._device.type != "cuda":
            return 0
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - own_cache

    def remaining(self, peak: int, utilization: float) -> int:
        """Return the bytes left for a KV cache; call once the trial's has been freed."""
        if self._device.type != "cuda":
            return available_memory(self._device, self._processes)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        others = total - free - torch.cuda.memory_reserved(self._device)
        return free_for_cache(total=total, utilization=utilization, peak=peak, others=others)


def profiled_memory(
    model: Decoder,
    cache: CacheConfig,
    scheduling: SchedulerConfig,
    max_model_len: int,
    *,
    processes: int,
    prepare: Callable[[int], None],
    earlier: EarlierStages | None = None,
) -> int:
    """Return the bytes that the largest step leaves for this process's KV cache.

    Args:
        processes: number of computing processes on this node.
        prepare: makes the processes with other parts of the model allocate a KV cache of the given
            number of blocks for the step.
        earlier: the previous pipeline stages, if any.
    """
    plan, num_blocks = heaviest_plan(
        max_num_seqs=scheduling.max_num_seqs,
        max_num_batched_tokens=scheduling.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=cache.block_size,
        vocab_size=model.spec.vocab_size,
    )
    prepare(num_blocks)
    trial = MemoryTrial(model.device, processes)
    runner = ModelRunner(
        model,
        max_num_seqs=scheduling.max_num_seqs,
        max_model_len=max_model_len,
        num_kv_blocks=num_blocks,
        block_size=cache.block_size,
        enforce_eager=True,
        earlier=earlier,
    )
    if model.spec.num_outputs is None:
        runner.run(plan)
    else:  # nothing is sampled
        runner.hidden_states(plan)
    block_bytes = bytes_per_block(model.spec, cache.block_size, model.kv_format)
    peak = trial.peak((num_blocks + 1) * block_bytes)
    del runner
    return trial.remaining(peak, cache.gpu_memory_utilization)
