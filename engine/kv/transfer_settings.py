"""An engine's role in disaggregated prefill: from its own flags, or vLLM's."""

from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from engine.kv.connector import GROUP, Connector
from engine.shared.config import CacheConfig
from engine.shared.plugins import offered

Role = Literal["prefill", "decode", "both"]

CONNECTOR = "SwellConnector"
"""Value of `kv_connector` for transfers between engines."""
CHAIN = "MultiConnector"
"""Value for several connectors, listed in `kv_connector_extra_config`."""

_ROLES: dict[str, Role] = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}


class BadKvTransfer(ValueError):
    """The settings of transfers are invalid, or their socket cannot be bound."""


class Transfer(NamedTuple):
    """An engine's role, its memory limit and its connectors."""

    role: Role | None
    """None if no blocks are exchanged with other engines."""
    max_bytes: int
    connectors: tuple[Connector, ...] = ()
    """Plugins' connectors, in lookup order."""


class _VllmConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`--kv-transfer-config`: the supported keys of vLLM."""

    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"]
    kv_connector: str = CONNECTOR
    kv_buffer_size: float | None = None
    """In bytes; overrides --kv-transfer-bytes."""
    kv_buffer_device: str = "cpu"
    kv_load_failure_policy: str = "recompute"
    kv_connector_extra_config: dict[str, Any] = {}


class _Chain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config` with several connectors."""

    connectors: Annotated[list[_VllmConfig], msgspec.Meta(min_length=1, max_length=8)]


def read_transfer(cache: CacheConfig, rank: int) -> Transfer | None:
    """Return the transfer settings of the engine with this rank; None if there are none.

    Raises:
        BadKvTransfer: the settings conflict, or request something unsupported.
    """
    given = [cache.kv_role is not None, bool(cache.prefill_engines), bool(cache.kv_transfer_config)]
    if sum(given) > 1:
        raise BadKvTransfer(
            "--kv-role, --prefill-engines and --kv-transfer-config are alternatives: give only one"
        )
    if cache.kv_transfer_config is not None:
        return _read_vllm_config(cache.kv_transfer_config, cache.kv_transfer_bytes)
    if cache.prefill_engines:
        role: Role = "prefill" if rank < cache.prefill_engines else "decode"
        return Transfer(role, cache.kv_transfer_bytes)
    return None if cache.kv_role is None else Transfer(cache.kv_role, cache.kv_transfer_bytes)


def _read_vllm_config(text: str, default_bytes: int) -> Transfer:
    try:
        whole = msgspec.json.decode(text, type=_VllmConfig)
        configs = [whole]
        if whole.kv_connector == CHAIN:
            configs = msgspec.convert(whole.kv_connector_extra_config, _Chain).connectors
            plain = _VllmConfig(kv_role="kv_both", kv_connector=CHAIN)
            if msgspec.structs.replace(whole, kv_connector_extra_config={}) != plain:
                raise BadKvTransfer(
                    f"--kv-transfer-config: with {CHAIN} only kv_role kv_both can be set; set "
                    "the rest for its connectors"
                )
    except msgspec.MsgspecError as error:
        raise BadKvTransfer(f"--kv-transfer-config: {error}") from error
    for each in configs:
        _check(each)
    own = [each for each in configs if each.kv_connector == CONNECTOR]
    if len(own) > 1:
        raise BadKvTransfer(f"--kv-transfer-config: {CONNECTOR} occurs more than once")
    connectors = tuple(
        Connector(each.kv_connector, each.kv_connector_extra_config)
        for each in configs
        if each.kv_connector != CONNECTOR
    )
    if not own:
        return Transfer(None, default_bytes, connectors)
    given = own[0].kv_buffer_size
    size = default_bytes if given is None else int(given)
    return Transfer(_ROLES[own[0].kv_role], size, connectors)


def _check(config: _VllmConfig) -> None:
    """Reject settings that a connector does not support."""
    name, is_own = config.kv_connector, config.kv_connector == CONNECTOR
    known = sorted({CONNECTOR, CHAIN, *offered(GROUP)})
    refused = {
        f"kv_connector {name!r}: there are {', '.join(known)}": name not in known,
        f"kv_connector {name!r} is no part of another": name == CHAIN,
        f"kv_role {config.kv_role!r}: {name} is for kv_both": (
            not is_own and config.kv_role != "kv_both"
        ),
        f"kv_buffer_device {config.kv_buffer_device!r}: it is always cpu": (
            config.kv_buffer_device != "cpu"
        ),
        f"kv_load_failure_policy {config.kv_load_failure_policy!r}: it is always recompute": (
            config.kv_load_failure_policy != "recompute"
        ),
        f"kv_connector_extra_config: {CONNECTOR} has nothing to configure": (
            is_own and bool(config.kv_connector_extra_config)
        ),
        f"kv_buffer_size is for {CONNECTOR}": not is_own and config.kv_buffer_size is not None,
        "kv_buffer_size has to be at least 1": (
            config.kv_buffer_size is not None and not config.kv_buffer_size >= 1
        ),
    }
    for reason, holds in refused.items():
        if holds:
            raise BadKvTransfer(f"--kv-transfer-config: {reason}")
