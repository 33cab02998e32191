"""Selects a model's vision encoder and locates its tensors."""

from pathlib import Path
from typing import NamedTuple

import torch

from engine.models.encoders.builder import Builder
from engine.models.encoders.tensors import DummyTensors, StoredTensors, Tensors
from engine.models.formats.files import TensorFiles
from engine.models.spec import ModelSpec, SiglipSpec, TowerSpec, VisionSpec
from engine.models.vision.qwen import QwenVisionEncoder, load_qwen_vision
from engine.models.vision.siglip import SiglipEncoder, load_siglip
from engine.models.vision.tower import TransformersTower, load_tower
from engine.shared.config import ModelConfig

VisionEncoder = SiglipEncoder | QwenVisionEncoder | TransformersTower


class _Names(NamedTuple):
    """Names of the encoder's tensors in files."""

    one: str
    """A tensor that is always present."""
    prefixes: tuple[str, ...]
    """Possible name prefixes."""
    others: tuple[str, ...]
    """Prefixes of tensors that are not needed."""


_IDEFICS3 = _Names(
    "vision_model.embeddings.patch_embedding.weight", ("model.",), ("text_model.", "lm_head.")
)
_GEMMA3 = _Names(
    "embeddings.patch_embedding.weight",
    ("vision_tower.vision_model.", "vision_tower.", "model.vision_tower.vision_model.",
     "model.vision_tower.", "model."),
    ("head.", "language_model.", "model.language_model.", "lm_head."),
)  # fmt: skip
_TOWERS = ("vision_tower.", "model.vision_tower.")
"""Possible name prefixes of the tensors of encoders that transformers computes."""
_QWEN = _Names("patch_embed.proj.weight", ("model.visual.", "visual."), ("model.", "lm_head."))


def _names(vision: VisionSpec) -> _Names:
    if not isinstance(vision, SiglipSpec):
        return _QWEN
    return _GEMMA3 if vision.is_gemma else _IDEFICS3


def has_vision(directory: Path, vision: VisionSpec, settings: ModelConfig) -> bool:
    """Return whether a model's files contain its vision encoder."""
    if settings.load_format == "dummy":
        return True
    found = TensorFiles(directory).shapes
    if isinstance(vision, TowerSpec):
        return any(name.startswith(_TOWERS) for name in found)
    names = _names(vision)
    return any(prefix + names.one in found for prefix in ("", *names.prefixes))


def load_vision(
    directory: Path,
    spec: ModelSpec,
    settings: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> VisionEncoder:
    """Load the vision encoder of a model that has one.

    Args:
        dtype: compute dtype of the text model.

    Raises:
        UnsupportedModel: it requires something that is not implemented.
        CheckpointError: the weights do not match the config.
    """
    vision = spec.vision
    assert vision is not None, "the model has no vision encoder"
    if isinstance(vision, TowerSpec):
        return load_tower(directory, vision, settings, dtype, device)
    names = _names(vision)
    tensors: Tensors = DummyTensors(directory, settings.seed, dtype)
    if settings.load_format != "dummy":
        tensors = StoredTensors(directory, names.one, names.prefixes)
    with torch.inference_mode():
        build = Builder(tensors, dtype, device, batch_invariant=False)
        encoder: VisionEncoder
        if isinstance(vision, SiglipSpec):
            encoder = load_siglip(directory, vision, build, spec.hidden_size)
        else:
            encoder = load_qwen_vision(directory, vision, build, spec.hidden_size)
    tensors.finish(*names.others)
    return encoder
