"""Llama 2 to 4 and models of the same architecture; only the text model of Llama 4.

Llama 4 attends in chunks and routes each token to one expert.
"""

from functools import partial

from msgspec.structs import replace

from engine.models.families.config_fields import (
    integer,
    llama_spec,
    number,
    read_rope,
    rotated_layers,
)
from engine.models.families.family import Config, Family
from engine.models.families.tensor_names import (
    NOT_TEXT,
    TEXT_PREFIXES,
    llama_weights,
    stacked_experts,
)
from engine.models.spec import ModelSpec, MoeSpec, TemperatureSpec, UnsupportedModel

_NAMES_4 = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp": "feed_forward",
    "shared_experts": "shared_expert",
}


def _spec_4(config: Config) -> ModelSpec:
    rope = read_rope(config, interleaved=True)
    spec = llama_spec(config, rope=rope)
    rotates = rotated_layers(config)
    kinds = config.get("layer_types") or [
        "chunked_attention" if rotated else "full_attention" for rotated in rotates
    ]
    if len(rotates) < spec.num_layers or len(kinds) < spec.num_layers:
        raise UnsupportedModel("config.json: no_rope_layers or layer_types has too few entries")
    layers, chunk = range(spec.num_layers), config["attention_chunk_size"]
    temperature = TemperatureSpec(
        scale=number(config, "attn_scale", 0.1),
        step=number(config, "floor_scale", 8192),
        offset=1,
        of_all_layers=False,
    )
    return replace(
        spec,
        intermediate_size=integer(config, "intermediate_size_mlp"),
        qk_norm="unit" if config.get("use_qk_norm") else "none",
        ropes=tuple(rope if rotates[layer] else None for layer in layers),
        windows=tuple(chunk if kinds[layer] == "chunked_attention" else None for layer in layers),
        has_chunks=chunk is not None,
        attention_temperature=temperature if config.get("attn_temperature_tuning") else None,
        moe=_experts_4(config, spec),
    )


def _experts_4(config: Config, spec: ModelSpec) -> MoeSpec:
    if integer(config, "num_experts_per_tok") != 1:
        raise UnsupportedModel("config.json: num_experts_per_tok of Llama 4 must be 1")
    step = integer(config, "interleave_moe_layer_step")
    sparse = config.get("moe_layers")
    if sparse is None:
        sparse = range(step - 1, spec.num_layers, step)
    return MoeSpec(
        num_experts=integer(config, "num_local_experts"),
        experts_per_token=1,
        intermediate_size=spec.intermediate_size,
        normalize_weights=False,
        layers=tuple(layer in sparse for layer in range(spec.num_layers)),
        scoring="sigmoid",
        scales_inputs=True,
        shared_size=spec.intermediate_size,
    )


FAMILY = Family(architectures=("LlamaForCausalLM",), spec=llama_spec, weights=llama_weights)

LLAMA_4 = Family(
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    spec=_spec_4,
    weights=partial(
        stacked_experts,
        names=_NAMES_4,
        gate_up="experts.gate_up_proj",
        down="experts.down_proj",
        is_transposed=True,
    ),
    ignored=("for_llm_compressor",),
    text_prefixes=TEXT_PREFIXES,
    not_text=NOT_TEXT,
)
