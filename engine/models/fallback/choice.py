"""Whether a model is computed by a family or by transformers; does not import torch."""

from functools import cache
from pathlib import Path
from typing import Literal

from engine.models.families.registry import FAMILIES, architecture_of
from engine.models.hf_config import read_config
from engine.models.spec import UnsupportedModel
from engine.shared.config import EngineConfig, ModelConfig
from engine.shared.gguf.directory import is_gguf

Implementation = Literal["swell", "transformers"]


@cache
def implementation(directory: Path, settings: ModelConfig) -> Implementation:
    """Return the implementation: the configured one, else the model's family, else transformers.

    Cached: a process reads config.json for this only once.

    Raises:
        UnsupportedModel: config.json is not a JSON object.
    """
    if settings.model_impl != "auto":
        return settings.model_impl
    if is_gguf(settings.model):
        return "swell"
    config = read_config(directory)
    try:
        architecture_of(config)
    except UnsupportedModel:
        return "transformers"
    return "swell"


def check_fallback(config: EngineConfig) -> None:
    """Refuse settings that the transformers fallback does not support.

    Raises:
        UnsupportedModel: names the settings.
    """
    parallel = config.parallel
    requested = {
        "--tensor-parallel-size": parallel.tensor_parallel_size > 1,
        "--pipeline-parallel-size": parallel.pipeline_parallel_size > 1,
        "--enable-expert-parallel": parallel.enable_expert_parallel,
        "--enable-lora": config.lora.enable_lora,
        "--batch-invariant": config.executor.batch_invariant is True,
        "--quantization": config.model.quantization is not None,
        "a GGUF file": is_gguf(config.model.model),
    }
    refused = [name for name, is_asked in requested.items() if is_asked]
    if refused:
        raise UnsupportedModel(
            f"{', '.join(refused)}: not for models computed by transformers "
            "(--model-impl), which have no built-in family; families: " + ", ".join(FAMILIES)
        )
