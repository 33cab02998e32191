"""Sizing and allocation of the KV cache."""

import os
from collections.abc import Sequence
from contextlib import suppress
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.models.attention.kv_format import KvFormat
from engine.models.spec import ModelSpec
from engine.runner.host_memory import untouched_zeros
from engine.scheduler.block_table import CacheShape
from engine.shared.config import CacheConfig

_MEMORY_SHARE = 0.5
"""Share of the free memory that all engines of a node take together by default. The rest is for
activations, other processes and the page cache that holds the checkpoint."""
_CUDA_SHARE = 0.85


class NotEnoughMemory(ValueError):
    """The KV cache cannot hold even one sequence of the maximum length."""


def bytes_per_block(spec: ModelSpec, block_size: int, kv_format: KvFormat) -> int:
    """Return the bytes of one block, over all layers of a group."""
    of_token = prod(kv_format.row(spec.kv_shape)) * kv_format.stored.itemsize
    return _layers_of_block(spec) * block_size * of_token


def count_blocks(
    config: CacheConfig,
    *,
    block_bytes: int,
    max_model_len: int,
    max_num_seqs: int,
    available_bytes: int,
    shape: CacheShape | None = None,
) -> int:
    """Return the number of KV blocks of one engine.

    Args:
        shape: the sequences' needs; default: blocks for all of their tokens.
        available_bytes: memory for the cache if the settings specify neither blocks nor bytes.

    Raises:
        NotEnoughMemory: the blocks do not hold one sequence of `max_model_len`.
    """
    shape = shape or CacheShape(config.block_size)
    per_sequence, num_groups = shape.blocks_for(max_model_len), len(shape.windows)
    if config.num_kv_blocks is not None:
        blocks = config.num_kv_blocks * num_groups
        source = "--num-kv-blocks"
    else:
        budget = config.kv_cache_memory_bytes or available_bytes
        blocks = min(budget // block_bytes, per_sequence * max_num_seqs)
        source = "--kv-cache-memory-bytes" if config.kv_cache_memory_bytes else "free memory"
    if blocks < per_sequence:
        needed = per_sequence * block_bytes / 2**20
        groups = f" in {num_groups} cache groups" if num_groups > 1 else ""
        raise NotEnoughMemory(
            f"{blocks} KV blocks of {config.block_size} tokens{groups} (from {source}) do not hold "
            f"one sequence of {max_model_len} tokens, which needs {per_sequence} blocks "
            f"({needed:.0f} MiB): lower --max-model-len or give the cache more memory"
        )
    return blocks


def available_memory(device: torch.device, engines_on_node: int) -> int:
    """Return the bytes that one of `engines_on_node` engines can use for its KV cache."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _CUDA_SHARE)
    return int(_free_host_memory() * _MEMORY_SHARE) // engines_on_node


def _free_host_memory() -> int:
    """Free and reclaimable bytes, within the control group's limit if there is one."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # not limited by a version 2 control group
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        if limit != "max":
            free = min(free, max(0, int(limit) - used))
    return free


def allocate_cache(
    spec: ModelSpec, num_blocks: int, block_size: int, kv_format: KvFormat, device: torch.device
) -> list[Tensor]:
    """Return a zeroed tensor per layer, [num_blocks, block_size, ...] in the format's layout.

    Layers of different groups share one, in separate blocks. On the CPU resident memory grows only
    as blocks are used.
    """
    shape, dtype = (num_blocks, block_size, *kv_format.row(spec.kv_shape)), kv_format.stored
    count = _layers_of_block(spec)
    if device.type == "cpu":
        shared = [untouched_zeros(shape, dtype) for _ in range(count)]
    else:
        shared = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(count)]
    return [shared[index] for index in spec.cache_groups.tensor_indices(spec.num_layers)]


def as_bytes(cache: Sequence[Tensor]) -> list[Tensor]:
    """Return a CPU cache as bytes [num_blocks, block_size, ...], without duplicate tensors."""
    different = {each.data_ptr(): each for each in cache}  # groups of layers share tensors
    return [each.view(torch.uint8) for each in different.values()]


def read_block(cache: Sequence[Tensor], block_id: int) -> bytes:
    """Return a block's content over all layers of a cache from `as_bytes`; no step may write it."""
    return b"".join([each[block_id].numpy().data for each in cache])


def write_block(cache: Sequence[Tensor], block_id: int, content: bytes) -> None:
    """Replace a block's content in a cache from `as_bytes`; no step may use it."""
    source, start = np.frombuffer(content, np.uint8), 0
    for each in cache:
        target = each[block_id].numpy()
        target[...] = source[start : start + target.size].reshape(target.shape)
        start += target.size


def _layers_of_block(spec: ModelSpec) -> int:
    """Return the maximum number of this process's layers per block."""
    return 1 + max(spec.cache_groups.tensor_indices(spec.num_layers), default=-1)
