"""GLM-4 to 4.7: half of each head is rotated.

GLM-4 and GLM-4-0414 rotate adjacent pairs and have fused MLP tensors; GLM-4.5 to 4.7 have experts
after the first layers, with a shared MLP.
"""

from functools import partial

from msgspec.structs import replace

from engine.models.families.config_fields import grouped_experts, llama_spec, read_rope
from engine.models.families.family import Config, Family
from engine.models.families.tensor_names import (
    CORRECTED_NAMES,
    LLAMA_NAMES,
    fused_weights,
    named_weights,
)
from engine.models.spec import ModelSpec
from engine.models.weights import WeightMap

_NAMES_0414 = {
    **LLAMA_NAMES,
    "attention_output_norm": "post_self_attn_layernorm",
    "mlp_output_norm": "post_mlp_layernorm",
}


def _spec(config: Config) -> ModelSpec:
    spec = llama_spec(config, rope=read_rope(config, interleaved=True))
    return replace(spec, output_bias=False, block="around" if _is_0414(spec) else "before")


def _weights(spec: ModelSpec) -> WeightMap:
    names = _NAMES_0414 if _is_0414(spec) else LLAMA_NAMES
    return fused_weights(spec, names, qkv=None, gate_up="gate_up_proj")


def _is_0414(spec: ModelSpec) -> bool:
    return spec.architecture == "Glm4ForCausalLM"


def _moe(config: Config) -> ModelSpec:
    return replace(
        llama_spec(config, rope=read_rope(config)),
        output_bias=False,
        qk_norm="head" if config.get("use_qk_norm") else "none",
        moe=grouped_experts(config),
    )


FAMILY = Family(architectures=("GlmForCausalLM", "Glm4ForCausalLM"), spec=_spec, weights=_weights)

MOE = Family(
    architectures=("Glm4MoeForCausalLM",),
    spec=_moe,
    weights=partial(named_weights, names=CORRECTED_NAMES),
    has_draft_layers=True,
    carries_normed=True,
)
