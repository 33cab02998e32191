"""Which encoder a model sees with, and where its tensors are."""

from pathlib import Path

import torch

from engine.models.encoders.builder import Builder
from engine.models.encoders.tensors import DummyTensors, StoredTensors, Tensors
from engine.models.spec import ModelSpec, SiglipSpec
from engine.models.vision.qwen import QwenVisionEncoder, load_qwen_vision
from engine.models.vision.siglip import SiglipEncoder, load_siglip
from engine.shared.config import ModelConfig

VisionEncoder = SiglipEncoder | QwenVisionEncoder

_SIGLIP = ("vision_model.embeddings.patch_embedding.weight", ("model.",))
_QWEN = ("patch_embed.proj.weight", ("model.visual.", "visual."))
"""A tensor that is there, and prefixes that the names of all may have."""


def load_vision(
    directory: Path,
    spec: ModelSpec,
    settings: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> VisionEncoder:
    """Load the vision encoder of a model that has one.

    Args:
        dtype: what the text model computes in.

    Raises:
        UnsupportedModel: it has something that is not implemented.
        CheckpointError: the weights do not fit the config.
    """
    vision = spec.vision
    assert vision is not None, "the model sees nothing"
    is_siglip = isinstance(vision, SiglipSpec)
    tensors: Tensors = DummyTensors(directory, settings.seed, dtype)
    if settings.load_format != "dummy":
        tensors = StoredTensors(directory, *(_SIGLIP if is_siglip else _QWEN))
    with torch.inference_mode():
        build = Builder(tensors, dtype, device, batch_invariant=False)
        encoder: VisionEncoder
        if isinstance(vision, SiglipSpec):
            encoder = load_siglip(directory, vision, build, spec.hidden_size)
        else:
            encoder = load_qwen_vision(directory, vision, build, spec.hidden_size)
    tensors.finish(*(("text_model.",) if is_siglip else ("model.",)), "lm_head.")
    return encoder
