"""Derives a model's weights, dtypes and maximum length from the settings."""

from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from engine.kernels.processor import float32_is_faster, has_16_bit_kernels
from engine.models.attention.kv_format import KvCacheDtype, KvFormat, kv_format
from engine.models.formats.checkpoint import Checkpoint, DummyCheckpoint, SafetensorsCheckpoint
from engine.models.formats.files import TensorFiles
from engine.models.loading.products import Quantization
from engine.models.spec import ModelSpec, UnsupportedModel
from engine.models.weights import decoder_tensors
from engine.shared.config import ModelConfig
from engine.shared.gguf.directory import is_gguf

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_SMALL = 1_000_000_000
"""Parameters below which quantization loses much accuracy."""
_LOST = {"int8": "4.2 %", "int4": "26 % (nothing where the checkpoint has 4 bits)"}
"""Perplexity increase of SmolLM2-135M, by quantization."""
_CACHED_WEIGHTS = 1 << 24
"""Maximum parameters of a small model: 64 MB in float32."""


def open_checkpoint(
    directory: Path, spec: ModelSpec, config: ModelConfig, sent: TensorFiles | None = None
) -> Checkpoint:
    """Open the configured weights, or those received from another engine.

    Raises:
        CheckpointError: the files do not match the model's config.
    """
    if sent is not None:
        return SafetensorsCheckpoint(directory, spec, files=sent)
    if config.load_format == "dummy":
        dtype = _DTYPES[spec.dtype or "float32" if config.dtype == "auto" else config.dtype]
        return DummyCheckpoint(directory, spec, config.seed, dtype)
    if is_gguf(config.model):
        # Imports a package that only GGUF needs.
        from engine.models.formats.gguf_checkpoint import GgufCheckpoint

        dtype_override = None if config.dtype == "auto" else _DTYPES[config.dtype]
        return GgufCheckpoint(Path(config.model).expanduser(), spec, dtype_override)
    return SafetensorsCheckpoint(directory, spec)


def fits_caches(spec: ModelSpec) -> bool:
    """Return whether the weights fit a processor's caches, even in float32."""
    return sum(prod(shape) for shape in decoder_tensors(spec).values()) <= _CACHED_WEIGHTS


class ComputeTypes(NamedTuple):
    """The dtypes a model computes in."""

    activations: torch.dtype
    """Also the dtype of the weights."""
    cache: torch.dtype
    """Dtype in which attention reads keys and values."""
    kv_cache_dtype: KvCacheDtype = "auto"
    """Storage format of the KV cache; auto: the dtype above."""

    @property
    def kv_format(self) -> KvFormat:
        """The format of the KV cache."""
        return kv_format(self.cache, self.kv_cache_dtype)


def compute_types(
    spec: ModelSpec,
    config: ModelConfig,
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    in_one_process: bool = True,
) -> ComputeTypes:
    """Return the configured dtypes; else the config's; else as stored.

    A small model's activations are float32 where that is faster; its KV cache is not. Processes
    that compute one model together (not `in_one_process`) exchange activations and can run on
    different processors, so they use the model's own dtype.
    """
    if config.dtype != "auto":
        dtype = _DTYPES[config.dtype]
        return ComputeTypes(dtype, dtype)
    dtype = _DTYPES[spec.dtype] if spec.dtype else checkpoint.dtype
    own = ComputeTypes(dtype, dtype)
    if dtype.itemsize != 2 or not in_one_process or config.quantization is not None:
        return own
    if device.type == "cpu" and float32_is_faster() and fits_caches(spec):
        return own._replace(activations=torch.float32)
    return own


def quantization(
    config: ModelConfig,
    types: ComputeTypes,
    *,
    device: torch.device,
    in_one_process: bool = True,
) -> Quantization | None:
    """Return the configured quantization, else whether weights stored in 4 bits stay so.

    Unless a dtype is configured, they do where expanded weights are slower for any number of rows,
    because oneDNN has no 16-bit product.
    """
    if config.quantization is not None or config.dtype != "auto" or not in_one_process:
        return config.quantization
    in_16_bits = device.type == "cpu" and types.activations.itemsize == 2
    return "stored" if in_16_bits and not has_16_bit_kernels() else None


def losses(spec: ModelSpec, length: int, rounding: Quantization | None) -> list[str]:
    """Return warnings about settings that degrade answers, to log at startup.

    Args:
        length: maximum sequence length in tokens.
        rounding: quantization of the weights.
    """
    found = []
    stretched = [rope for rope in spec.distinct_ropes if rope.short_factor != rope.long_factor]
    original = min((rope.original_max_position_embeddings for rope in stretched), default=length)
    if length > original:
        found.append(
            f"LongRoPE: sequences of any length use the frequencies for long ones, as "
            f"--max-model-len {length} is more than {original}; where all are shorter, "
            f"--max-model-len {original} gives better answers"
        )
    parameters = sum(prod(shape) for shape in decoder_tensors(spec).values())
    if rounding in _LOST and parameters < _SMALL:
        found.append(
            f"--quantization {rounding} on a model of {parameters / 1e6:.0f} million parameters: "
            f"the perplexity of one of 135 million rose by {_LOST[rounding]}"
        )
    return found


def model_length(spec: ModelSpec, config: ModelConfig) -> int:
    """Return the maximum sequence length in tokens.

    Raises:
        UnsupportedModel: the configured length exceeds the model's.
    """
    longest = spec.max_position_embeddings
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        raise UnsupportedModel(
            f"--max-model-len {config.max_model_len} is more than the {longest} positions "
            "that the model was made for"
        )
    return config.max_model_len
