"""How many blocks a KV cache gets, and that its memory is only taken when used."""

import os
from typing import Any

import pytest
import torch

from engine.models.hf_config import parse_spec
from engine.runner.kv_memory import (
    NotEnoughMemory,
    allocate_cache,
    available_memory,
    bytes_per_block,
    count_blocks,
)
from engine.shared.config import CacheConfig

CPU = torch.device("cpu")
SPEC = parse_spec(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 512,
    },
    {},
)


def count(available: int = 10_000, **cache: Any) -> int:
    return count_blocks(
        CacheConfig(block_size=16, **cache),
        block_bytes=100,
        max_model_len=100,
        max_num_seqs=4,
        available_bytes=available,
    )


def test_bytes_of_a_block_count_keys_and_values_of_all_layers() -> None:
    assert bytes_per_block(SPEC, 16, torch.bfloat16) == 2 * 16 * 2 * (2 * 16) * 2
    assert bytes_per_block(SPEC, 16, torch.float32) == 2 * bytes_per_block(SPEC, 16, torch.bfloat16)


def test_set_number_of_blocks_wins() -> None:
    assert count(num_kv_blocks=50, kv_cache_memory_bytes=800) == 50


def test_set_bytes_win_over_free_memory() -> None:
    assert count(kv_cache_memory_bytes=1234) == 12


def test_no_more_than_can_ever_be_used() -> None:
    assert count(available=10**9) == 7 * 4


@pytest.mark.parametrize("cache", [{"num_kv_blocks": 6}, {"kv_cache_memory_bytes": 699}])
def test_one_sequence_has_to_fit(cache: dict[str, int]) -> None:
    with pytest.raises(NotEnoughMemory, match="needs 7 blocks"):
        count(**cache)


def test_engines_of_a_node_share_its_memory() -> None:
    alone, four = available_memory(CPU, 1), available_memory(CPU, 4)
    assert 0 < four < alone
    assert alone < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cache_takes_memory_only_when_used(dtype: torch.dtype) -> None:
    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    cache = allocate_cache(SPEC, 100_000, 16, dtype, CPU)
    assert cache[0].dtype == dtype
    assert cache[0].shape == (100_000, 16, 2, 2, 16)
    assert resident() - before < 16 * 2**20
    assert not cache[1][::20_000].any()
