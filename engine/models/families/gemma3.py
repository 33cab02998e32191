"""Gemma 3: full attention in one layer of six; larger versions accept images."""

from math import isqrt
from typing import Any

from msgspec.structs import replace

from engine.models.families.config_fields import (
    cap,
    integer,
    layer_windows,
    layered_ropes,
    siglip_spec,
)
from engine.models.families.family import Config, Family
from engine.models.families.gemma2 import gemma_spec, gemma_weights
from engine.models.spec import ModelSpec, SiglipSpec, UnsupportedModel

_VISION_DEFAULTS: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
"""Defaults of SigLIP's configuration class in transformers."""


def _spec(config: Config) -> ModelSpec:
    windows = layer_windows(config, pattern=config.get("sliding_window_pattern") or 6)
    full, local = layered_ropes(config)
    return replace(
        gemma_spec(config, full),
        qk_norm="head",
        windows=windows,
        ropes=tuple(full if window is None else local for window in windows),
        logits_softcap=cap(config, "final_logit_softcapping"),
        vision=_vision(config),
    )


def _vision(config: Config) -> SiglipSpec | None:
    vision_config = config.get("vision_config")
    if vision_config is None:
        return None
    values = {**_VISION_DEFAULTS, **vision_config}
    size, patch = integer(values, "image_size"), integer(values, "patch_size")
    tokens = integer({"mm_tokens_per_image": 256, **config}, "mm_tokens_per_image")
    side = isqrt(tokens)
    token = config.get("image_token_index", config.get("image_token_id", 262144))
    spec = siglip_spec(
        values,
        token_id=integer({"image_token_index": token}, "image_token_index"),
        scale_factor=max(1, size // patch // side),
        is_gemma=True,
    )
    if spec.max_tokens != tokens:
        raise UnsupportedModel(
            f"config.json: mm_tokens_per_image {tokens} does not match images of {size} x {size} "
            f"pixels with patches of {patch} x {patch}"
        )
    return spec


FAMILY = Family(
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    spec=_spec,
    weights=gemma_weights,
    ignored=("_sliding_window_pattern", "attn_logit_softcapping"),
    text_prefixes=("model.", "language_model.model.", "model.language_model."),
    not_text=(
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ),
)
