"""The roles of engines in disaggregated prefill, set by flags and vLLM's keys."""

import json
from typing import Any

import msgspec
import pytest

from engine.kv.tier_opening import BadTiers, check_tiers
from engine.kv.transfer_settings import BadKvTransfer, Role, Transfer, read_transfer
from engine.shared.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    ParallelConfig,
    SchedulerConfig,
)
from engine.vllm.arguments import check_settings

SIZE = 1 << 30


def read(rank: int = 0, **settings: Any) -> Transfer | None:
    return read_transfer(CacheConfig(**settings), rank)


def test_no_transfer_without_a_role() -> None:
    assert read() is None


def test_a_role_is_given_to_all_engines_or_by_rank() -> None:
    assert read(kv_role="both") == Transfer("both", SIZE)
    roles = [transfer.role for rank in range(3) if (transfer := read(rank, prefill_engines=2))]
    assert roles == ["prefill", "prefill", "decode"]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("kv_producer", "prefill"), ("kv_consumer", "decode"), ("kv_both", "both")],
)
def test_vllm_keys_have_the_same_meaning(theirs: str, ours: Role) -> None:
    config = {"kv_connector": "SwellConnector", "kv_role": theirs, "kv_buffer_size": 5e6}
    assert read(kv_transfer_config=json.dumps(config)) == Transfer(ours, 5_000_000)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"kv_connector": "NixlConnector"}, "NixlConnector"),
        ({"kv_buffer_device": "cuda"}, "kv_buffer_device"),
        ({"kv_load_failure_policy": "fail"}, "kv_load_failure_policy"),
        ({"kv_connector_extra_config": {"a": 1}}, "kv_connector_extra_config"),
        ({"kv_ip": "0.0.0.0"}, "kv_ip"),
        ({"kv_role": "kv_neither"}, "kv_neither"),
        ({"kv_buffer_size": 0}, "kv_buffer_size"),
    ],
)
def test_unsupported_vllm_config_is_refused_by_name(changed: dict[str, Any], named: str) -> None:
    config = {"kv_role": "kv_both"} | changed
    with pytest.raises(BadKvTransfer, match=f"--kv-transfer-config: .*{named}"):
        read(kv_transfer_config=json.dumps(config))


def test_role_specified_twice_is_refused() -> None:
    with pytest.raises(BadKvTransfer, match="give only one"):
        read(kv_role="both", prefill_engines=1)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"parallel": ParallelConfig(pipeline_parallel_size=2)}, "--pipeline-parallel-size"),
        ({"parallel": ParallelConfig(enable_expert_parallel=True)}, "--enable-expert-parallel"),
        ({"scheduler": SchedulerConfig(speculative_model="x")}, "--speculative-model"),
        ({"executor": ExecutorConfig(executor="simulated")}, "--executor simulated"),
    ],
)
@pytest.mark.parametrize(
    ("flag", "cache"),
    [
        ("--kv-role", CacheConfig(kv_role="prefill")),
        ("--kv-disk-tier-dir", CacheConfig(kv_disk_tier_dir="/x")),
    ],
)
def test_settings_incompatible_with_transferred_or_stored_blocks_are_refused_by_name(
    flag: str, cache: CacheConfig, changed: dict[str, Any], reason: str
) -> None:
    config = EngineConfig(cache=cache)
    check_tiers(config, pools=False)
    with pytest.raises(BadTiers, match=f"{flag}: .*{reason}"):
        check_tiers(msgspec.structs.replace(config, **changed), pools=False)
    with pytest.raises(BadTiers, match=f"{flag}: .*generates"):
        check_tiers(config, pools=True)


@pytest.mark.parametrize(
    "settings",
    [{"kv_role": "both"}, {"prefill_engines": 1}, {"kv_transfer_config": "{}"}],
    ids=lambda each: next(iter(each)),
)
def test_vllm_engines_refuse_kv_transfer_by_name(settings: dict[str, Any]) -> None:
    [name] = settings
    with pytest.raises(ValueError, match="--" + name.replace("_", "-")):
        check_settings(EngineConfig(cache=CacheConfig(**settings)))
