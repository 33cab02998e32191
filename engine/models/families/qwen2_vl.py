"""Qwen 2 VL and 2.5 VL: Qwen 2 with a vision encoder and row and column positions of images."""

from typing import Any

from msgspec.structs import replace

from engine.models.families.config_fields import integer, llama_spec, read_rope, rope_parameters
from engine.models.families.family import Config, Family
from engine.models.families.qwen import qwen_windows
from engine.models.families.tensor_names import llama_weights
from engine.models.spec import ModelSpec, QwenVisionSpec, RopeSpec, UnsupportedModel

_VISION_DEFAULTS: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": (7, 15, 23, 31),
}
"""Defaults of Qwen2.5-VL's configuration class in transformers."""
_FIRST_DEFAULTS: dict[str, Any] = {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "hidden_act": "quick_gelu",
    "mlp_ratio": 4,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
"""Defaults of Qwen2-VL's configuration class in transformers."""
_EPS = 1e-6
"""Epsilon of all norms of the encoder."""


def _spec(config: Config) -> ModelSpec:
    rope = _rope(config)
    spec = llama_spec(config, rope=rope)
    if sum(rope.sections) != spec.head_dim // 2:
        raise UnsupportedModel(
            f"config.json: mrope_section {rope.sections} does not add up to half of the "
            f"{spec.head_dim} dimensions of a head"
        )
    vision = _vision(config, spec.hidden_size)
    windows = qwen_windows(config)
    return replace(spec, qkv_bias=True, output_bias=False, windows=windows, vision=vision)


def _rope(config: Config) -> RopeSpec:
    parameters = dict(rope_parameters(config))
    for key in ("rope_type", "type"):
        if parameters.get(key) == "mrope":
            parameters[key] = "default"
    sections = tuple(parameters.get("mrope_section") or (16, 24, 24))
    if len(sections) != 3:
        raise UnsupportedModel(f"config.json: mrope_section {sections} must be three numbers")
    rope = read_rope(config.replaced(rope_scaling=None, rope_parameters=parameters))
    return replace(rope, sections=sections)


def _vision(config: Config, text_size: int) -> QwenVisionSpec | None:
    vision_config = config.get("vision_config")
    if vision_config is None:
        return None
    is_first = config["architectures"] == ["Qwen2VLForConditionalGeneration"]
    values = _of_first(vision_config) if is_first else {**_VISION_DEFAULTS, **vision_config}
    if values.get("in_channels", values.get("in_chans", 3)) != 3:
        raise UnsupportedModel("config.json: in_channels of vision_config must be 3")
    spec = QwenVisionSpec(
        token_id=integer(
            {"image_token_id": config.get("image_token_id", 151655)}, "image_token_id"
        ),
        patch_size=integer(values, "patch_size"),
        scale_factor=integer(values, "spatial_merge_size"),
        hidden_size=integer(values, "hidden_size"),
        intermediate_size=integer(values, "intermediate_size"),
        num_layers=integer(values, "depth"),
        num_heads=integer(values, "num_heads"),
        activation=values["hidden_act"],
        eps=_EPS,
        is_first=is_first,
        frames=integer(values, "temporal_patch_size"),
        window_size=integer(values, "window_size"),
        full_attention_layers=tuple(values["fullatt_block_indexes"]),
        theta=float((values.get("rope_parameters") or {}).get("rope_theta") or 10000.0),
    )
    if spec.window_size < spec.token_side:
        raise UnsupportedModel(
            f"config.json: window_size {spec.window_size} is less than patch_size "
            f"{spec.patch_size} times spatial_merge_size {spec.scale_factor}"
        )
    if values["out_hidden_size"] != text_size:
        key = "hidden_size" if is_first else "out_hidden_size"
        raise UnsupportedModel(
            f"config.json: {key} {values['out_hidden_size']} of vision_config is not the text "
            f"model's hidden_size {text_size}"
        )
    return spec


def _of_first(vision_config: dict[str, Any]) -> dict[str, Any]:
    """Convert a Qwen2-VL `vision_config` to the keys of Qwen2.5-VL."""
    values = {**_FIRST_DEFAULTS, **vision_config}
    width = integer(values, "embed_dim")
    return {
        **values,
        "hidden_size": width,
        "intermediate_size": int(width * values["mlp_ratio"]),
        "out_hidden_size": values["hidden_size"],
        "window_size": 1 << 20,  # larger than any image
        "fullatt_block_indexes": range(integer(values, "depth")),
    }


FAMILY = Family(
    architectures=("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    spec=_spec,
    weights=llama_weights,
    ignored=(
        "video_token_id",
        "vision_end_token_id",
        "vision_start_token_id",
        "vision_token_id",
    ),
    text_prefixes=("model.language_model.", "model.", ""),
    not_text=("model.visual.", "visual."),
)
