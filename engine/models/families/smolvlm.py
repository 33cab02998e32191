"""SmolVLM and Idefics 3: a Llama with a SigLIP vision encoder."""

from typing import Any

from msgspec.structs import replace

from engine.models.families.config_fields import integer, llama_spec, siglip_spec
from engine.models.families.family import Config, Family
from engine.models.families.tensor_names import llama_weights
from engine.models.spec import ModelSpec, SiglipSpec, UnsupportedModel

_TEXT_TYPES = (None, "llama", "smolvlm", "idefics3")
"""Types of text models; Llama if unspecified."""
_VISION_DEFAULTS: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
"""Defaults of both configuration classes in transformers."""


def _spec(config: Config) -> ModelSpec:
    kind = config.get("model_type")
    if kind not in _TEXT_TYPES:
        raise UnsupportedModel(
            f"config.json: a text_config of model_type {kind!r} is not supported"
        )
    return replace(llama_spec(config), vision=_vision(config))


def _vision(config: Config) -> SiglipSpec | None:
    vision_config = config.get("vision_config")
    if vision_config is None:
        return None
    values = {**_VISION_DEFAULTS, **vision_config}
    spec = siglip_spec(
        values,
        token_id=integer({"image_token_id": 128257, **config}, "image_token_id"),
        scale_factor=integer({"scale_factor": 2, **config}, "scale_factor"),
    )
    if not spec.num_tokens(spec.image_size, spec.image_size):
        raise UnsupportedModel(
            f"config.json: image_size {spec.image_size} is not a multiple of patch_size "
            f"{spec.patch_size} times scale_factor {spec.scale_factor}"
        )
    return spec


FAMILY = Family(
    architectures=("SmolVLMForConditionalGeneration", "Idefics3ForConditionalGeneration"),
    spec=_spec,
    weights=llama_weights,
    ignored=(
        "_flash_attn_2_enabled",
        "is_llama_config",
        "neftune_noise_alpha",
        "perceiver_config",
        "pixel_shuffle_factor",
        "qk_layer_norms",
        "transformers.js_config",
        "use_resampler",
    ),
    text_prefixes=("model.text_model.",),
    not_text=("model.vision_model.", "model.connector."),
)
