"""Reads models of transformers from local files."""

from pathlib import Path
from typing import Any

import torch

from engine.models.formats.files import CheckpointError, weight_files
from engine.shared.config import ModelConfig


def read_pretrained(
    directory: Path,
    model_class: Any,
    config: Any,
    settings: ModelConfig,
    dtype: torch.dtype | None,
    *,
    ignore_mismatched_sizes: bool = False,
    **options: Any,
) -> tuple[Any, dict[str, Any]]:
    """Return a model on the CPU, and what transformers reports of tensors that do not fit.

    The weights are random with `--load-format dummy`. No code of the directory is run.

    Args:
        model_class: a class of transformers.
        config: its configuration.
        dtype: None: the one in the configuration.
        ignore_mismatched_sizes: whether tensors of wrong shapes are reported instead of an error.
        options: further arguments of the class.

    Raises:
        CheckpointError: files are missing or cannot be read.
    """
    if settings.load_format == "dummy":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            stated = dtype or getattr(config, "dtype", None) or torch.float32
            return model_class._from_config(config, dtype=stated, **options), {}
    weight_files(directory)
    try:
        model, report = model_class.from_pretrained(
            directory,
            config=config,
            dtype=dtype or "auto",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=ignore_mismatched_sizes,
            **options,
        )
    except Exception as error:  # of many types, from several libraries
        raise CheckpointError(f"transformers does not load {directory}: {error}") from error
    return model, report
