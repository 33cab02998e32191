"""Detection of settings that have no effect in combination with the others."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from engine.shared.config import Section
from engine.shared.settings import Setting, settings_of

Values = Mapping[str, Any]


class _Need(NamedTuple):
    names: tuple[str, ...]
    condition: str
    """The flags or settings that make it effective."""
    holds: Callable[[Values], bool]


def _drafts(values: Values) -> bool:
    return values["speculative_model"] is not None or values["speculative_method"] == "mtp"


_NEEDS = (
    _Need(
        ("max_loras", "max_cpu_loras", "max_lora_rank"),
        "--enable-lora",
        lambda values: values["enable_lora"],
    ),
    _Need(
        ("num_speculative_tokens", "speculative_model_quantization"),
        "--speculative-model or --speculative-method mtp",
        _drafts,
    ),
    _Need(
        ("prompt_lookup_min", "prompt_lookup_max"),
        "--speculative-ngram",
        lambda values: values["speculative_ngram"] > 0,
    ),
    _Need(
        ("speculative_row_price", "speculative_disable_by_batch_size"),
        "--speculative-ngram or --speculative-model",
        lambda values: _drafts(values) or values["speculative_ngram"] > 0,
    ),
    _Need(
        ("admission_policy", "admission_cadence", "level_wait_weight", "level_hold_per_rank",
         "enable_eplb", "regroup", "group_timeout"),
        "--enable-expert-parallel, which makes engines step together",
        lambda values: values["enable_expert_parallel"],
    ),
    _Need(
        ("num_redundant_experts", "eplb_step_interval"),
        "--enable-eplb",
        lambda values: values["enable_eplb"],
    ),
    _Need(
        ("pipeline_layer_partition",),
        "--pipeline-parallel-size of at least 2",
        lambda values: values["pipeline_parallel_size"] > 1,
    ),
    _Need(
        ("ray_address", "ray_dp_pack_strategy", "ray_wait_for_nodes", "ray_engine_resources",
         "ray_engine_memory", "ray_placement_groups", "ray_namespace", "ray_env",
         "api_server_placement"),
        "--data-parallel-backend ray",
        lambda values: values["data_parallel_backend"] == "ray",
    ),
    _Need(
        ("simulated_step_us", "simulated_token_us"),
        "--executor simulated",
        lambda values: values["executor"] == "simulated",
    ),
    _Need(
        ("response_store_bytes", "response_store_age"),
        "a --response-store",
        lambda values: values["response_store"] != "none",
    ),
    _Need(
        ("routing_index_blocks",),
        "--routing-policy prefix-aware",
        lambda values: values["routing_policy"] == "prefix-aware",
    ),
    _Need(
        ("kv_transfer_bytes",),
        "--kv-role, --prefill-engines or --kv-transfer-config",
        lambda values: (
            values["kv_role"] is not None
            or values["prefill_engines"] > 0
            or values["kv_transfer_config"] is not None
        ),
    ),
    _Need(
        ("prefill_engines",),
        "a larger --data-parallel-size: no engine answers only",
        lambda values: (
            values["data_parallel_size"] == 1  # of a command that starts one of several engines
            or values["prefill_engines"] < values["data_parallel_size"]
        ),
    ),
    _Need(
        ("kv_disk_tier_bytes",),
        "--kv-disk-tier-dir",
        lambda values: values["kv_disk_tier_dir"] is not None,
    ),
    _Need(
        ("kv_tier_policy",),
        "--kv-memory-tier-bytes, --kv-disk-tier-dir or --kv-transfer-config",
        lambda values: (
            bool(values["kv_memory_tier_bytes"] or values["kv_disk_tier_dir"])
            or values["kv_transfer_config"] is not None
        ),
    ),
    _Need(
        ("allowed_methods", "allowed_headers", "allow_credentials"),
        "--allowed-origins",
        lambda values: bool(values["allowed_origins"]),
    ),
    _Need(
        ("ssl_keyfile", "ssl_ca_certs"),
        "--ssl-certfile",
        lambda values: values["ssl_certfile"] is not None,
    ),
)  # fmt: skip


def ineffective_settings(config: Section) -> Iterator[str]:
    """Yield a message for each setting that was changed but has no effect."""
    settings: dict[str, Setting] = {each.name: each for each in settings_of(config.__class__)}
    values = {name: getattr(getattr(config, each.section), name) for name, each in settings.items()}
    for names, condition, holds in _NEEDS:
        changed = [
            name
            for name in names
            if name in settings and values[name] not in (settings[name].default, None)
        ]
        if changed and not holds(values):
            flags = ", ".join(settings[name].flag for name in changed)
            verb = "have" if len(changed) > 1 else "has"
            yield f"{flags} {verb} no effect without {condition}"
