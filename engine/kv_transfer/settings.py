"""What an engine does in a split of prompts and answers: from its flags, or with vLLM's names."""

from typing import Any, Literal, NamedTuple

import msgspec

from engine.shared.config import CacheConfig

Role = Literal["prefill", "decode", "both"]

CONNECTOR = "SwellConnector"
"""The only value of `kv_connector`."""

_ROLES: dict[str, Role] = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}


class BadKvTransfer(ValueError):
    """The settings of transfers are wrong, or their socket cannot be bound."""


class Transfer(NamedTuple):
    """What an engine does, and how much memory it has for it."""

    role: Role
    max_bytes: int


class _VllmConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`--kv-transfer-config`: the keys of vLLM that mean something here."""

    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"]
    kv_connector: str = CONNECTOR
    kv_buffer_size: float | None = None
    """Bytes, as of --kv-transfer-bytes."""
    kv_buffer_device: str = "cpu"
    kv_load_failure_policy: str = "recompute"
    kv_connector_extra_config: dict[str, Any] = {}


def read_transfer(cache: CacheConfig, rank: int) -> Transfer | None:
    """Return what the engine of this rank does; None if it hands no blocks on and reads none.

    Raises:
        BadKvTransfer: the settings contradict each other, or ask for what there is not.
    """
    given = [cache.kv_role is not None, bool(cache.prefill_engines), bool(cache.kv_transfer_config)]
    if sum(given) > 1:
        raise BadKvTransfer(
            "--kv-role, --prefill-engines and --kv-transfer-config say the same: leave all but one "
            "out"
        )
    if cache.kv_transfer_config is not None:
        return _read_vllm_config(cache.kv_transfer_config, cache.kv_transfer_bytes)
    if cache.prefill_engines:
        role: Role = "prefill" if rank < cache.prefill_engines else "decode"
        return Transfer(role, cache.kv_transfer_bytes)
    return None if cache.kv_role is None else Transfer(cache.kv_role, cache.kv_transfer_bytes)


def _read_vllm_config(text: str, default_bytes: int) -> Transfer:
    try:
        config = msgspec.json.decode(text, type=_VllmConfig)
    except msgspec.MsgspecError as error:
        raise BadKvTransfer(f"--kv-transfer-config: {error}") from error
    refused = {
        f"kv_connector {config.kv_connector!r}: there is only {CONNECTOR}": (
            config.kv_connector != CONNECTOR
        ),
        f"kv_buffer_device {config.kv_buffer_device!r}: it is always cpu": (
            config.kv_buffer_device != "cpu"
        ),
        f"kv_load_failure_policy {config.kv_load_failure_policy!r}: it is always recompute": (
            config.kv_load_failure_policy != "recompute"
        ),
        "kv_connector_extra_config: there is nothing to configure": bool(
            config.kv_connector_extra_config
        ),
        "kv_buffer_size has to be at least 1": (
            config.kv_buffer_size is not None and not config.kv_buffer_size >= 1
        ),
    }
    for reason, holds in refused.items():
        if holds:
            raise BadKvTransfer(f"--kv-transfer-config: {reason}")
    size = default_bytes if config.kv_buffer_size is None else int(config.kv_buffer_size)
    return Transfer(_ROLES[config.kv_role], size)
