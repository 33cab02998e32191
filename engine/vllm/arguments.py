"""Translation of engine settings to vLLM's arguments."""

from pathlib import Path
from typing import Any

import msgspec
import yaml

from engine.shared.config import EngineConfig, Section

MAPPED = {
    "model": "model", "revision": "revision", "dtype": "dtype", "load_format": "load_format",
    "max_model_len": "max_model_len", "seed": "seed", "block_size": "block_size",
    "num_kv_blocks": "num_gpu_blocks_override", "kv_cache_memory_bytes": "kv_cache_memory_bytes",
    "gpu_memory_utilization": "gpu_memory_utilization", "kv_cache_dtype": "kv_cache_dtype",
    "enable_prefix_caching": "enable_prefix_caching", "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens", "scheduling_policy": "scheduling_policy",
    "enable_chunked_prefill": "enable_chunked_prefill",
    "long_prefill_token_threshold": "long_prefill_token_threshold",
    "async_scheduling": "async_scheduling", "enforce_eager": "enforce_eager",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "language_model_only": "language_model_only", "enable_lora": "enable_lora",
    "max_loras": "max_loras", "limit_mm_per_prompt": "limit_mm_per_prompt",
}  # fmt: skip
"""vLLM's argument names by setting; a setting at its default is not passed to vLLM."""

_BACKEND_INDEPENDENT = frozenset({
    "served_model_name", "generation_config", "override_generation_config", "chat_template",
    "default_chat_template_kwargs",
    "engine_backend", "engine_python", "engine_args", "threads", "cpu_bind", "step_timeout",
    "device", "enable_expert_parallel", "max_lora_rank", "max_cpu_loras", "lora_modules",
    "lora_dir", "worker_extensions", "torch_profiler_dir", "runner",
    "pooler_config",
})  # fmt: skip
"""Settings that apply to every engine backend, or that are validated separately."""

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM's `max_lora_rank` can have."""

_RESERVED = frozenset({
    "disable_log_stats", "data_parallel_size", "distributed_executor_backend", "max_cpu_loras",
    "max_lora_rank", "reasoning_parser", "runner", "pooler_config",
})  # fmt: skip
"""vLLM arguments that cannot be set in --engine-args."""

_PARALLEL = ("nnodes", "enable_eplb", "pipeline_layer_partition")
"""Parallelism settings that vLLM engines do not support; the others apply to the cluster."""


def check_settings(config: EngineConfig) -> None:
    """Reject settings that a vLLM engine would ignore.

    Raises:
        ValueError: names the setting.
    """
    if config.parallel.enable_expert_parallel and config.parallel.data_parallel_size > 1:
        raise ValueError(
            "--enable-expert-parallel over several engines needs --engine-backend swell: vLLM's "
            "engine core reserves its collectives for its own data-parallel processes; use "
            "--data-parallel-size 1, or leave it out"
        )
    sections: tuple[Section, ...] = (config.model, config.cache, config.scheduler,
                                     config.executor, config.lora)  # fmt: skip
    supported = _BACKEND_INDEPENDENT | set(MAPPED)
    names = [each for section in sections for each in _changed(section) if each not in supported]
    names += [name for name in _changed(config.parallel) if name in _PARALLEL]
    if names:
        flag = "--" + names[0].replace("_", "-")
        raise ValueError(
            f"{flag} needs --engine-backend swell: leave it out, or set vLLM's own argument in "
            "--engine-args"
        )


def engine_arguments(config: EngineConfig, known: frozenset[str]) -> dict[str, Any]:
    """Return vLLM's arguments; `known` contains the argument names of the installed version.

    Raises:
        ValueError: a setting is not supported, or --engine-args is invalid.
    """
    check_settings(config)
    arguments: dict[str, Any] = {"model": config.model.model}
    sections = (
        config.model, config.cache, config.scheduler, config.executor, config.parallel, config.lora,
    )  # fmt: skip
    for section in sections:
        for name, value in _changed(section).items():
            if name in MAPPED:
                arguments[MAPPED[name]] = value
    # Zero limits keep vLLM from loading encoders and reserving memory for unsupported media.
    arguments["limit_mm_per_prompt"] = {"image": config.model.max_images, "video": 0, "audio": 0}
    if config.lora.enable_lora:
        # vLLM never evicts an adapter that the cluster has: it would read its files again.
        arguments["max_cpu_loras"] = config.lora.max_held
        ranks = (each for each in _LORA_RANKS if each >= config.lora.max_lora_rank)
        arguments["max_lora_rank"] = next(ranks)
    if config.executor.torch_profiler_dir is not None:
        directory = str(Path(config.executor.torch_profiler_dir).absolute())
        arguments["profiler_config"] = {
            "profiler": "torch",
            "torch_profiler_dir": directory,
            # Writing stacks holds the GIL for seconds, and the coordinator hears no heartbeats.
            "torch_profiler_with_stack": False,
        }
    if config.parallel.enable_expert_parallel:
        arguments["enable_expert_parallel"] = True
    for name, value in _parse_engine_args(config.executor.engine_args).items():
        if name in _RESERVED or name in MAPPED.values():
            setting = next((each for each, argument in MAPPED.items() if argument == name), name)
            raise ValueError(f"--engine-args: {name}: use --{setting.replace('_', '-')}")
        if name not in known:
            raise ValueError(f"--engine-args: this version of vLLM has no argument {name!r}")
        arguments[name] = value
    return arguments


def _parse_engine_args(text: str) -> dict[str, Any]:
    try:
        is_file = Path(text).is_file()
    except OSError:  # too long for a path
        is_file = False
    try:
        arguments = yaml.safe_load(Path(text).read_text() if is_file else text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--engine-args is neither YAML nor JSON: {error}") from error
    if not isinstance(arguments or {}, dict):
        raise ValueError("--engine-args has to be an object of vLLM's arguments")
    return {str(name).replace("-", "_"): value for name, value in (arguments or {}).items()}


def _changed(section: Section) -> dict[str, Any]:
    """Return the fields whose values differ from their defaults."""
    default = type(section)()
    return {
        name: value
        for name, value in msgspec.structs.asdict(section).items()
        if value != getattr(default, name)
    }
