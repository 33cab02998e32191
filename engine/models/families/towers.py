"""Vision encoders that transformers computes: which images they take."""

from typing import Any

from engine.models.families.config_fields import integer
from engine.models.families.family import Config
from engine.models.spec import TowerSpec
from engine.shared.messages import WHOLE_PATCHES


def read_tower(config: Config) -> TowerSpec | None:
    """Return the vision encoder of a Mistral 3, LLaVA or InternVL; None if it is not served."""
    own: dict[str, Any] | None = config.get("vision_config")
    if own is None:
        return None
    is_mistral = config["architectures"][0].startswith("Mistral3")
    is_internvl = config["architectures"][0].startswith("InternVL")
    kind = own.get("model_type", "pixtral" if is_mistral else "clip_vision_model")
    default_id = 10 if is_mistral else 151667 if is_internvl else 32000
    token = config.get("image_token_index", config.get("image_token_id", default_id))
    token_id = integer({"image_token_index": token}, "image_token_index")
    if kind == "pixtral":
        merged = config.get("spatial_merge_size") if is_mistral else 1
        return TowerSpec(
            token_id=token_id,
            patch_size=_side(own, "patch_size", 14 if is_mistral else 16),
            scale_factor=2 if merged is None else merged,
            image_size=_side(own, "image_size", 1540 if is_mistral else 1024),
            is_square=False,
        )
    strategy = config.get("vision_feature_select_strategy") or "default"
    if is_internvl and strategy == "default":
        return TowerSpec(
            token_id=token_id,
            patch_size=_side(own, "patch_size", 14),
            scale_factor=round(1 / (config.get("downsample_ratio") or 0.5)),
            image_size=_side(own, "image_size", 448),
        )
    if is_internvl or is_mistral or strategy != WHOLE_PATCHES.get(kind):
        return None
    return TowerSpec(
        token_id=token_id,
        patch_size=_side(own, "patch_size", 14),
        scale_factor=1,
        image_size=_side(own, "image_size", 336),
    )


def _side(given: dict[str, Any], key: str, default: int) -> int:
    """Return a size that may be stated as height and width."""
    value = given.get(key, default)
    return integer({key: value[0] if isinstance(value, list) else value}, key)
