"""How much memory a step takes at most, found by running the largest one."""

import torch

from engine.config import CacheConfig, SchedulerConfig
from engine.messages import SamplingParams
from engine.models.decoder import Decoder
from engine.runner.kv_memory import bytes_per_block
from engine.runner.model_runner import ModelRunner
from engine.scheduler.batch import BatchPlan, SlotBlocks, SlotStart


def heaviest_plan(
    *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int
) -> tuple[BatchPlan, int]:
    """Return a step with all the tokens and draws that there can be, and the KV blocks it needs."""
    rows = min(max_num_seqs, max_num_batched_tokens)
    share, rest = divmod(max_num_batched_tokens, rows)
    counts = [min(share + (row < rest), max_model_len) for row in range(rows)]
    sampling = SamplingParams(max_tokens=1, seed=0, top_p=0.9, frequency_penalty=0.1)
    starting, blocks, used = [], [], 0
    for slot, count in enumerate(counts):
        needed = -(-count // block_size)
        starting.append(SlotStart(slot, [0] * count, count, sampling))
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
        peak: most that weights and the largest step took.
        others: what is taken outside of that, as by the driver and by other processes.
    """
    return max(0, int(total * utilization) - peak - others)


def profiled_memory(
    model: Decoder, cache: CacheConfig, scheduling: SchedulerConfig, max_model_len: int
) -> int:
    """Return the bytes of a CUDA device that are left for the KV cache of its engine."""
    device = model.device
    plan, num_blocks = heaviest_plan(
        max_num_seqs=scheduling.max_num_seqs,
        max_num_batched_tokens=scheduling.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=cache.block_size,
    )
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    runner = ModelRunner(
        model,
        max_num_seqs=scheduling.max_num_seqs,
        max_model_len=max_model_len,
        num_kv_blocks=num_blocks,
        block_size=cache.block_size,
        record_decodes=False,
    )
    runner.run(plan)
    torch.cuda.synchronize(device)
    own_cache = (num_blocks + 1) * bytes_per_block(model.spec, cache.block_size, model.cache_dtype)
    peak = torch.cuda.max_memory_allocated(device) - own_cache
    del runner
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return free_for_cache(
        total=total, utilization=cache.gpu_memory_utilization, peak=peak, others=others
    )
