"""Ministral 3 and Mistral Small 3, of which the text models are served: queries may be tempered."""

from msgspec.structs import replace

from engine.models.families.family import Config, Family
from engine.models.families.placing import llama_weights
from engine.models.families.reading import llama_spec, rope_parameters, uniform_windows
from engine.models.spec import ModelSpec, TemperatureSpec


def _spec(config: Config) -> ModelSpec:
    spec = replace(llama_spec(config), windows=uniform_windows(config))
    scale, (rope,) = rope_parameters(config).get("llama_4_scaling_beta"), spec.distinct_ropes
    if scale is None:
        return spec
    step = rope.original_max_position_embeddings
    return replace(spec, attention_temperature=TemperatureSpec(scale=scale, step=step))


FAMILY = Family(
    architectures=("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"),
    spec=_spec,
    weights=llama_weights,
    text_prefixes=("model.", "language_model.model.", "model.language_model."),
    not_text=(
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ),
)
