"""Llama 4, of which the text model is served: chunks of attention, and experts with one choice."""

from functools import partial

from msgspec.structs import replace

from engine.models.families.family import Config, Family
from engine.models.families.placing import stacked_experts
from engine.models.families.reading import integer, llama_spec, number, read_rope
from engine.models.spec import ModelSpec, MoeSpec, TemperatureSpec, UnsupportedModel

_NAMES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp": "feed_forward",
    "shared_experts": "shared_expert",
}


def _spec(config: Config) -> ModelSpec:
    rope = read_rope(config, interleaved=True)
    spec = llama_spec(config, rope=rope)
    # Despite their name, 1 stands for a layer that is rotated.
    every = _all_but_each(integer(config, "no_rope_layer_interval"), spec.num_layers)
    rotates = config.get("no_rope_layers") or every
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
        moe=_experts(config, spec),
    )


def _all_but_each(interval: int, layers: int) -> list[bool]:
    return [(layer + 1) % interval != 0 for layer in range(layers)]


def _experts(config: Config, spec: ModelSpec) -> MoeSpec:
    if integer(config, "num_experts_per_tok") != 1:
        raise UnsupportedModel("config.json: num_experts_per_tok of Llama 4 has to be 1")
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


FAMILY = Family(
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    spec=_spec,
    weights=partial(
        stacked_experts,
        names=_NAMES,
        gate_up="experts.gate_up_proj",
        down="experts.down_proj",
        is_transposed=True,
    ),
    ignored=("for_llm_compressor",),
    text_prefixes=("model.", "language_model.model.", "model.language_model."),
    not_text=(
        "vision_model.",
        "multi_modal_projector.",
        "model.vision_model.",
        "model.multi_modal_projector.",
    ),
)
