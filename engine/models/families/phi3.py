"""Phi 3, 3.5, 4 and 4-mini: fused tensors, LongRoPE, some with partially rotated heads."""

from functools import partial

from msgspec.structs import replace

from engine.models.families.config_fields import llama_spec, read_rope, uniform_windows
from engine.models.families.family import Config, Family
from engine.models.families.tensor_names import LLAMA_NAMES, fused_weights
from engine.models.spec import ModelSpec


def _spec(config: Config) -> ModelSpec:
    scaling = config.get("rope_scaling")
    if scaling is not None and scaling.get("type") == "yarn":  # early versions' name of LongRoPE
        config = config.replaced(rope_scaling={**scaling, "type": "longrope"})
    spec = llama_spec(config, rope=read_rope(config))
    return replace(spec, windows=uniform_windows(config))


FAMILY = Family(
    architectures=("Phi3ForCausalLM",),
    spec=_spec,
    weights=partial(fused_weights, names=LLAMA_NAMES, qkv="qkv_proj", gate_up="gate_up_proj"),
    ignored=("full_attn_mod", "interpolate_factor", "lm_head_bias"),
)
