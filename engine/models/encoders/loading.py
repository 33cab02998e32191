"""Loads an encoder and its head from a directory."""

from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import torch

from engine.kernels.processor import float32_is_faster
from engine.models.encoders import bert, modernbert
from engine.models.encoders.builder import Builder
from engine.models.encoders.encoder import Encoder
from engine.models.encoders.tensors import DummyTensors, StoredTensors, Tensors
from engine.models.families.config_fields import integer
from engine.models.hf_config import read_config
from engine.models.spec import UnsupportedModel
from engine.shared.config import ModelConfig
from engine.shared.pooling import PoolingSpec

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_SUFFIXES = ("Model", "ForSequenceClassification", "ForMaskedLM")
_FAMILIES: dict[str, ModuleType] = {
    "Bert": bert,
    "Roberta": bert,
    "XLMRoberta": bert,
    "ModernBert": modernbert,
}
_SERVED = {name + suffix: family for name, family in _FAMILIES.items() for suffix in _SUFFIXES}


class LoadedEncoder(msgspec.Struct, frozen=True):
    """An encoder, with its properties needed by the executor."""

    encoder: Encoder
    fingerprint: str
    vocab_size: int
    max_model_len: int
    """Maximum sequence length in tokens."""


def load_encoder(
    directory: Path,
    settings: ModelConfig,
    pooling: PoolingSpec,
    device: torch.device,
    *,
    batch_invariant: bool = False,
) -> LoadedEncoder:
    """Load a model.

    Raises:
        UnsupportedModel: the config or settings require something that is not implemented.
        CheckpointError: the weights do not match the config.
    """
    config = read_config(directory)
    name = (config.get("architectures") or [""])[0]
    if name not in _SERVED:
        raise UnsupportedModel(
            f"architecture {name or 'none'} is not supported; supported encoders are: "
            + ", ".join(_SERVED)
        )
    family: Any = _SERVED[name]
    longest = _longest(family.longest(config), settings, pooling)
    tensors = _tensors(directory, settings, family)
    with torch.inference_mode():
        build = Builder(
            tensors, _type(settings, tensors.dtype, device), device, batch_invariant=batch_invariant
        )
        encoder = family.load(config, build)
        if pooling.task == "classify":
            encoder.head = family.head(config, build, pooling.size)
    tensors.finish(*family.IGNORED)
    return LoadedEncoder(encoder, tensors.fingerprint(), integer(config, "vocab_size"), longest)


def _tensors(directory: Path, settings: ModelConfig, family: Any) -> Tensors:
    if settings.load_format == "dummy":
        return DummyTensors(directory, settings.seed, torch.float32)
    return StoredTensors(directory, family.EMBEDDING, family.PREFIXES)


def _type(settings: ModelConfig, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the configured dtype; else as stored, or float32 where that is faster."""
    if settings.dtype != "auto":
        return _DTYPES[settings.dtype]
    slow = device.type == "cpu" and stored.itemsize == 2 and float32_is_faster()
    return torch.float32 if slow else stored


def _longest(positions: int, settings: ModelConfig, pooling: PoolingSpec) -> int:
    requested = settings.max_model_len
    if requested is None:
        return min(positions, pooling.max_length or positions)
    if requested > positions:
        raise UnsupportedModel(
            f"--max-model-len {requested} is more than the {positions} positions that the model "
            "was made for"
        )
    return requested
