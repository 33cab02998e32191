"""Settings on which the processes of a cluster have to agree, as text for error messages."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from engine.shared.config import EngineConfig, ModelConfig
from engine.shared.model_files import model_directory
from engine.shared.pooling import read_pooling

MODEL_KEYS = ("model", "revision", "tokenizer", "runner", "pooler_config")
"""Keys on which front ends have to agree with engines; `group_config` has more."""

AGREED_SETTINGS = (
    "dtype", "quantization", "batch_invariant", "max_model_len", "block_size", "load_format",
    "revision", "model", "runner", "pooler_config", "model_impl", "kv_cache_dtype", "enable_lora",
    "max_cpu_loras", "max_loras", "max_lora_rank", "seed", "enable_expert_parallel",
)  # fmt: skip
"""The settings that determine `group_config`; the chart checks them."""

AGREED_IN_LOCKSTEP = (
    "regroup", "tensor_parallel_size", "pipeline_parallel_size", "device", "enable_eplb",
    "num_redundant_experts", "eplb_step_interval", "async_scheduling", "speculative_ngram",
    "speculative_model", "speculative_method", "num_speculative_tokens", "max_num_seqs",
    "max_num_batched_tokens", "admission_policy", "admission_cadence", "level_wait_weight",
    "level_hold_per_rank",
)  # fmt: skip
"""Additional settings on which lockstep engines have to agree."""

ADDED_IN = {"tensor_parallel_size": 4, "pipeline_parallel_size": 4, "device": 4}
"""First protocol version that sends these keys; older processes are not checked for them."""

_SHOWN_DIGITS = 16


def stated_in(settings: Mapping[str, str], protocol: int) -> dict[str, str]:
    """Return the settings that processes of a protocol version send."""
    return {key: text for key, text in settings.items() if ADDED_IN.get(key, 0) <= protocol}


def model_identity(model: ModelConfig) -> dict[str, str]:
    """Return the identity of the served model, by the names of `MODEL_KEYS`.

    The tokenizer is a digest of its file, absent if the model has none; the runner is the resolved
    one, configured or detected.

    Raises:
        ModelNotFound: there is no such model.
        BadPooling: the model does not support the configured --runner.
    """
    directory = model_directory(model, weights=False)
    tokenizer = directory / "tokenizer.json"
    identity = {
        "model": _name(model.model),
        "revision": model.revision or "default",
        "runner": "generate" if read_pooling(directory, model) is None else "pooling",
        "pooler_config": model.pooler_config,
    }
    if tokenizer.is_file():
        digest = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
        identity["tokenizer"] = digest[:_SHOWN_DIGITS]
    return identity


def group_config(config: EngineConfig, *, lockstep: bool = False) -> dict[str, str]:
    """Return the settings that have to be equal on all engines of a cluster, by flag name.

    Lockstep engines also have to agree on everything that affects decisions in a step.

    Raises:
        ModelNotFound: there is no such model.
    """
    together = {
        "lockstep": "true",
        "data_parallel_size": str(config.parallel.data_parallel_size),
        "regroup": config.parallel.regroup,
        "tensor_parallel_size": str(config.parallel.tensor_parallel_size),
        "pipeline_parallel_size": str(config.parallel.pipeline_parallel_size),
        "device": config.model.device,
        "enable_eplb": str(config.parallel.enable_eplb),
        "num_redundant_experts": str(config.parallel.num_redundant_experts),
        "eplb_step_interval": str(config.parallel.eplb_step_interval),
        "steps_overlap": str(config.scheduler.steps_overlap),
        "max_num_seqs": str(config.scheduler.max_num_seqs),
        "max_num_batched_tokens": str(config.scheduler.max_num_batched_tokens),
        "admission_policy": str(config.scheduler.admission_policy),
        "admission_cadence": str(config.scheduler.admission_cadence),
        "level_wait_weight": str(config.scheduler.level_wait_weight),
        "level_hold_per_rank": str(config.scheduler.level_hold_per_rank),
    }
    is_invariant = config.executor.batch_invariant
    return {
        **(together if lockstep else {}),
        **model_identity(config.model),
        "model_impl": config.model.model_impl,
        "dtype": config.model.dtype,
        "quantization": str(config.model.quantization),
        "batch_invariant": "auto" if is_invariant is None else str(is_invariant),
        "max_model_len": str(config.model.max_model_len),
        "block_size": str(config.cache.block_size),
        "kv_cache_dtype": "auto" if config.cache.kv_cache_dtype == "auto" else "fp8",
        "load_format": config.model.load_format,
        "enable_lora": str(config.lora.enable_lora),
        "max_cpu_loras": str(config.lora.max_held),
        "max_lora_rank": str(config.lora.max_lora_rank),
        "seed": str(config.model.seed),
    }


def _name(model: str) -> str:
    local = Path(model).expanduser()
    return Path(os.path.abspath(local)).name if local.is_dir() else Path(model).name
