"""MiniMax-M2: experts in every layer, chosen by corrected scores; norms over all queries."""

from msgspec.structs import replace

from engine.models.families.config_fields import (
    expert_layers,
    integer,
    llama_spec,
    number,
    read_rope,
)
from engine.models.families.family import Config, Family
from engine.models.families.tensor_names import MIXTRAL_NAMES, stored_name
from engine.models.spec import ModelSpec, UnsupportedModel
from engine.models.weights import Shape, Source, WeightMap, weight_map

_KNOWN = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "shared_intermediate_size": 0,
}
"""Settings of the published models' own code that have the same value in all of them."""


def _spec(config: Config) -> ModelSpec:
    for key, known in _KNOWN.items():
        if config.get(key, known) != known:
            raise UnsupportedModel(f"config.json: {key} {config[key]!r} is not supported")
    share = config.get("partial_rotary_factor")
    if share is None and config.get("rotary_dim") is not None:
        share = number(config, "rotary_dim", 0) / integer(config, "head_dim")
    spec = llama_spec(config, rope=read_rope(config.replaced(partial_rotary_factor=share)))
    spec = expert_layers(spec, config, scoring="sigmoid", has_correction=True)
    return replace(spec, qk_norm="width")


def _weights(spec: ModelSpec) -> WeightMap:
    def place(name: str, shape: Shape) -> Source:
        if name.endswith(".router.correction"):
            block = name.removesuffix("router.correction")
            stored = stored_name(block, MIXTRAL_NAMES) + "e_score_correction_bias"
            return Source(name=stored, shape=shape)
        return Source(name=stored_name(name, MIXTRAL_NAMES), shape=shape)

    return weight_map(spec, place)


FAMILY = Family(
    architectures=("MiniMaxM2ForCausalLM",),
    spec=_spec,
    weights=_weights,
    ignored=("attn_type_list", "mtp_transformer_layers", "num_mtp_modules", "use_mtp"),
)
