"""The number of blocks of a KV cache; its memory is allocated only when used."""

import os
from typing import Any

import msgspec
import pytest
import torch

from engine.models.attention.kv_format import Fp8Kv, PlainKv
from engine.models.cache_groups import CacheGroups
from engine.models.hf_config import parse_spec, read_spec
from engine.runner.kv_memory import (
    NotEnoughMemory,
    allocate_cache,
    available_memory,
    bytes_per_block,
    count_blocks,
)
from engine.scheduler.block_table import CacheShape
from engine.shared.config import CacheConfig
from tests.engine.fixtures import SaveModel

CPU = torch.device("cpu")
BF16, FP8 = PlainKv(torch.bfloat16), Fp8Kv(torch.bfloat16)
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


def count(available: int = 10_000, shape: CacheShape | None = None, **cache: Any) -> int:
    return count_blocks(
        CacheConfig(block_size=16, **cache),
        block_bytes=100,
        max_model_len=100,
        max_num_seqs=4,
        available_bytes=available,
        shape=shape,
    )


def test_bytes_of_a_block_count_keys_and_values_of_all_layers() -> None:
    assert bytes_per_block(SPEC, 16, BF16) == 2 * 16 * 2 * (2 * 16) * 2
    assert bytes_per_block(SPEC, 16, PlainKv(torch.float32)) == 2 * bytes_per_block(SPEC, 16, BF16)


def test_8_bit_cache_takes_half_of_16_bits_plus_2_bytes_per_head() -> None:
    in_16, in_8 = (bytes_per_block(SPEC, 16, each) for each in (BF16, FP8))
    assert in_8 == in_16 // 2 + 2 * 16 * 2 * 2 * 2
    cache = allocate_cache(SPEC, 5, 16, FP8, CPU)
    assert sum(layer.nbytes for layer in cache) == 5 * in_8


def test_latent_models_cache_one_latent_and_one_key(checkpoint: SaveModel) -> None:
    spec = read_spec(checkpoint("deepseek3").directory)
    assert spec.num_heads == 4
    kept = 32 + 16  # latent and rotated key; 4 heads of 40 and 20 would be 5 times as many
    num_bytes = bytes_per_block(spec, 8, BF16)
    assert num_bytes == 3 * 8 * kept * 2
    cache = allocate_cache(spec, 5, 8, BF16, CPU)
    assert sum(layer.nbytes for layer in cache) == 5 * num_bytes


def test_deepseek_v3_caches_576_values_per_token_and_layer() -> None:
    published = parse_spec(
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": 129280,
            "max_position_embeddings": 163840,
        },
        {},
    )
    assert bytes_per_block(published, 1, BF16) == 61 * 576 * 2


def test_explicit_number_of_blocks_wins() -> None:
    assert count(num_kv_blocks=50, kv_cache_memory_bytes=800) == 50


def test_explicit_bytes_win_over_free_memory() -> None:
    assert count(kv_cache_memory_bytes=1234) == 12


def test_a_set_number_of_blocks_is_for_each_cache_group() -> None:
    shape = CacheShape(16, [None, 20, 20], lookahead=8)
    assert count(num_kv_blocks=50, shape=shape) == 3 * 50
    with pytest.raises(NotEnoughMemory, match="12 KV blocks of 16 tokens in 3 cache groups"):
        count(num_kv_blocks=4, shape=shape)


def test_layers_of_different_cache_groups_share_memory() -> None:
    spec = msgspec.structs.replace(
        SPEC,
        num_layers=3,
        windows=(9, None, 9),
        cache_groups=CacheGroups((9, None, 9), (0, 1, 2)),
    )
    cache = allocate_cache(spec, 5, 16, BF16, CPU)
    assert len({layer.data_ptr() for layer in cache}) == 1
    assert cache[0].nbytes == 5 * bytes_per_block(spec, 16, BF16)
    assert bytes_per_block(spec, 16, BF16) * 2 == bytes_per_block(SPEC, 16, BF16)


def test_number_of_blocks_is_limited_to_what_can_be_used() -> None:
    assert count(available=10**9) == 7 * 4


@pytest.mark.parametrize("cache", [{"num_kv_blocks": 6}, {"kv_cache_memory_bytes": 699}])
def test_cache_must_hold_one_sequence(cache: dict[str, Any]) -> None:
    with pytest.raises(NotEnoughMemory, match="needs 7 blocks"):
        count(**cache)


def test_engines_of_a_node_share_its_memory() -> None:
    alone, four = available_memory(CPU, 1), available_memory(CPU, 4)
    assert 0 < four < alone
    assert alone < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cache_memory_is_allocated_on_first_use(dtype: torch.dtype) -> None:
    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    cache = allocate_cache(SPEC, 100_000, 16, PlainKv(dtype), CPU)
    assert cache[0].dtype == dtype
    assert cache[0].shape == (100_000, 16, 2, 2, 16)
    assert resident() - before < 16 * 2**20
    assert not cache[1][::20_000].any()
