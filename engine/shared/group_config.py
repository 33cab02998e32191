"""What the processes of a cluster have to agree on, as text that a refusal can show."""

import hashlib
import os
from pathlib import Path

from engine.shared.config import EngineConfig, ModelConfig
from engine.shared.model_files import model_directory

MODEL_KEYS = ("model", "revision", "tokenizer")
"""What front ends have to agree with engines on; `group_config` holds it among others."""

_SHOWN_DIGITS = 16


def model_identity(model: ModelConfig) -> dict[str, str]:
    """Return which model a process serves, by the names of `MODEL_KEYS`.

    The tokenizer is a digest of its file, left out where the model has none.

    Raises:
        ModelNotFound: there is no such model.
    """
    tokenizer = model_directory(model, weights=False) / "tokenizer.json"
    identity = {"model": _name(model.model), "revision": model.revision or "default"}
    if tokenizer.is_file():
        digest = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
        identity["tokenizer"] = digest[:_SHOWN_DIGITS]
    return identity


def group_config(config: EngineConfig, *, lockstep: bool = False) -> dict[str, str]:
    """Settings that have to be equal on all engines of a cluster, by flag name.

    Engines that step together also have to come to the same decisions in every step.

    Raises:
        ModelNotFound: there is no such model.
    """
    together = {
        "lockstep": "true",
        "data_parallel_size": str(config.parallel.data_parallel_size),
        "regroup": config.parallel.regroup,
        "max_num_seqs": str(config.scheduler.max_num_seqs),
        "max_num_batched_tokens": str(config.scheduler.max_num_batched_tokens),
        "admission_policy": str(config.scheduler.admission_policy),
        "admission_cadence": str(config.scheduler.admission_cadence),
        "level_wait_weight": str(config.scheduler.level_wait_weight),
        "level_hold_per_rank": str(config.scheduler.level_hold_per_rank),
    }
    return {
        **(together if lockstep else {}),
        **model_identity(config.model),
        "dtype": config.model.dtype,
        "quantization": str(config.model.quantization),
        "batch_invariant": str(config.executor.batch_invariant),
        "max_model_len": str(config.model.max_model_len),
        "block_size": str(config.cache.block_size),
        "load_format": config.model.load_format,
        "seed": str(config.model.seed),
    }


def _name(model: str) -> str:
    local = Path(model).expanduser()
    return Path(os.path.abspath(local)).name if local.is_dir() else Path(model).name
