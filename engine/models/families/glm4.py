"""GLM-4 and GLM-4-0414: half of each head is rotated, in neighbouring pairs; fused MLP tensors."""

from msgspec.structs import replace

from engine.models.families.family import Config, Family
from engine.models.families.placing import LLAMA_NAMES, fused_weights
from engine.models.families.reading import llama_spec, read_rope
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


FAMILY = Family(architectures=("GlmForCausalLM", "Glm4ForCausalLM"), spec=_spec, weights=_weights)
