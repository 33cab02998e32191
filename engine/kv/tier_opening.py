"""Opens the configured tiers of an engine."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import Protocol, runtime_checkable

from engine.kv.block_store import MODEL_SIZE, BlockStore
from engine.kv.connector import ConnectedStore, Connector
from engine.kv.tiers import KvTiers, Peers
from engine.shared.config import EngineConfig
from engine.shared.messages import EngineCounters
from engine.shared.version import SWELL_VERSION

MEMORY_TIERS = Path("/dev/shm")


class BadTiers(ValueError):
    """The tiers conflict with other settings, or cannot be opened."""


@runtime_checkable
class KvMemory(Protocol):
    """An executor whose KV blocks can be copied."""

    @property
    def device_type(self) -> str: ...

    @property
    def block_format(self) -> str: ...

    def read_block(self, block_id: int) -> bytes: ...

    def write_block(self, block_id: int, content: bytes) -> None: ...


def check_tiers(config: EngineConfig, *, pools: bool) -> None:
    """Reject settings that do not support tiers and blocks of other engines.

    `pools`: whether the model produces vectors instead of tokens.

    Raises:
        BadTiers: naming the setting to change.
    """
    flag = tier_setting(config)
    if flag is None:
        return
    parallel = config.parallel
    refused = {
        "leave out --no-enable-prefix-caching": not config.cache.enable_prefix_caching,
        "leave --pipeline-parallel-size at 1": parallel.pipeline_parallel_size > 1,
        "leave out --enable-expert-parallel": parallel.enable_expert_parallel,
        "leave out --speculative-model and --speculative-method": (
            config.scheduler.drafts_with_model
        ),
        "leave out --executor simulated": config.executor.executor == "simulated",
        "serve a model that generates": pools,
    }
    reasons = [reason for reason, applies in refused.items() if applies]
    if reasons:
        raise BadTiers(f"{flag}: {'; '.join(reasons)}")


def require_host_memory(config: EngineConfig, executor: KvMemory) -> None:
    """Reject a KV cache whose blocks cannot be copied.

    Raises:
        BadTiers: it is on a device.
    """
    if executor.device_type != "cpu":
        raise BadTiers(
            f"{tier_setting(config)} needs --device cpu: blocks are copied from host memory only"
        )


def open_tiers(
    config: EngineConfig,
    executor: KvMemory,
    fingerprint: str,
    *,
    peers: Peers | None = None,
    connectors: Sequence[Connector] = (),
    counters: EngineCounters | None = None,
) -> KvTiers | None:
    """Return the tiers of an engine, or None if none are configured.

    Blocks are copied from and to the executor's KV cache. `peers` are given if other engines read
    blocks or provide some; plugins' connectors are both written and read. `fingerprint` is that of
    the model's weights; `counters` are the engine's.

    Raises:
        BadTiers: a directory cannot be used.
        BadPlugin: a connector cannot be used.
    """
    cache, flag = config.cache, tier_setting(config)
    if flag is None and peers is None:
        return None
    require_host_memory(config, executor)
    configured = [
        (MEMORY_TIERS / f"swell-kv-{os.geteuid()}", cache.kv_memory_tier_bytes, False),
        (cache.kv_disk_tier_dir and Path(cache.kv_disk_tier_dir), cache.kv_disk_tier_bytes, True),
    ]
    stores: list[BlockStore | ConnectedStore] = []
    with ExitStack() as opened:  # closed if a later one cannot be opened
        for root, max_bytes, outlives_users in configured:
            if not root or not max_bytes:
                continue
            try:
                stores.append(BlockStore(root, max_bytes, outlives_users=outlives_users))
            except OSError as error:
                raise BadTiers(f"{flag}: {error}") from error
            opened.callback(stores[-1].close)
        for each in connectors:
            stores.append(ConnectedStore(each, config))
            opened.callback(stores[-1].close)
        opened.pop_all()
    tiers = KvTiers(
        stores,
        cache.kv_tier_policy,
        executor.read_block,
        executor.write_block,
        peers=peers,
        counters=counters,
    )
    tiers.model = model_name(executor, fingerprint)
    return tiers


def model_name(executor: KvMemory, fingerprint: str) -> bytes:
    """Return the key prefix of blocks: a hash of weights, block format and version."""
    described = f"{fingerprint}\n{executor.block_format}\n{SWELL_VERSION}"
    return blake2b(described.encode(), digest_size=MODEL_SIZE).digest()


def tier_setting(config: EngineConfig) -> str | None:
    """Return the setting that requests tiers, or blocks of other engines."""
    cache = config.cache
    settings = {
        "--kv-role": cache.kv_role,
        "--prefill-engines": cache.prefill_engines,
        "--kv-transfer-config": cache.kv_transfer_config,
        "--kv-disk-tier-dir": cache.kv_disk_tier_dir,
        "--kv-memory-tier-bytes": cache.kv_memory_tier_bytes,
    }
    return next((flag for flag, value in settings.items() if value), None)
