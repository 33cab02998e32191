"""What the settings make of a model: its weights, its types and its longest sequence."""

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
"""Parameters of models that lose much by rounding."""
_LOST = {"int8": "4.2 %", "int4": "26 % (nothing where the checkpoint has 4 bits)"}
"""SmolLM2-135M, by the type that its weights are rounded to."""
_CACHED_WEIGHTS = 1 << 24
"""Parameters of the largest model that counts as small: 64 MB in float32."""


def open_checkpoint(
    directory: Path, spec: ModelSpec, config: ModelConfig, sent: TensorFiles | None = None
) -> Checkpoint:
    """Open the weights that the settings ask for, or those that were sent for their model.

    Raises:
        CheckpointError: the files do not hold what the model's config says.
    """
    if sent is not None:
        return SafetensorsCheckpoint(directory, spec, files=sent)
    if config.load_format == "dummy":
        dtype = _DTYPES[spec.dtype or "float32" if config.dtype == "auto" else config.dtype]
        return DummyCheckpoint(directory, spec, config.seed, dtype)
    if is_gguf(config.model):
        # Brings a package that no other model needs.
        from engine.models.formats.gguf.checkpoint import GgufCheckpoint

        wanted = None if config.dtype == "auto" else _DTYPES[config.dtype]
        return GgufCheckpoint(Path(config.model).expanduser(), spec, wanted)
    return SafetensorsCheckpoint(directory, spec)


def fits_caches(spec: ModelSpec) -> bool:
    """Whether a processor's caches hold the weights, even in float32."""
    return sum(prod(shape) for shape in decoder_tensors(spec).values()) <= _CACHED_WEIGHTS


class ComputeTypes(NamedTuple):
    """What a model computes in."""

    activations: torch.dtype
    """Also of the weights."""
    cache: torch.dtype
    """Of keys and values, when attention reads them."""
    kept: KvCacheDtype = "auto"
    """How the KV cache keeps them; auto: in that type."""

    @property
    def kv_format(self) -> KvFormat:
        """What the KV cache holds."""
        return kv_format(self.cache, self.kept)


def compute_types(
    spec: ModelSpec,
    config: ModelConfig,
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    is_alone: bool = True,
) -> ComputeTypes:
    """Return the types that are set; else the config's, else as stored.

    A small model is computed in float32 where that is faster, but for its KV cache. Processes that
    compute one model together (not `is_alone`) exchange activations and may run on different
    processors, so they keep the model's own type.
    """
    if config.dtype != "auto":
        dtype = _DTYPES[config.dtype]
        return ComputeTypes(dtype, dtype)
    dtype = _DTYPES[spec.dtype] if spec.dtype else checkpoint.dtype
    own = ComputeTypes(dtype, dtype)
    if dtype.itemsize != 2 or not is_alone or config.quantization is not None:
        return own
    if device.type == "cpu" and float32_is_faster() and fits_caches(spec):
        return own._replace(activations=torch.float32)
    return own


def quantization(
    config: ModelConfig, types: ComputeTypes, *, device: torch.device, is_alone: bool = True
) -> Quantization | None:
    """Return what is set; else whether weights stored in 4 bits stay so.

    They do where products of expanded ones are slower for any number of rows, as oneDNN has none
    of 16 bits, unless a type for them is set.
    """
    if config.quantization is not None or config.dtype != "auto" or not is_alone:
        return config.quantization
    in_16_bits = device.type == "cpu" and types.activations.itemsize == 2
    return "stored" if in_16_bits and not has_16_bit_kernels() else None


def losses(spec: ModelSpec, length: int, rounding: Quantization | None) -> list[str]:
    """Return what makes answers worse than the model could give them, for the log at the start.

    Args:
        length: the longest sequence in tokens.
        rounding: of weights.
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
    """Return the longest sequence in tokens.

    Raises:
        UnsupportedModel: the settings ask for more than the model was made for.
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
