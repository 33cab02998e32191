"""Mistral, Mistral Small 3, Ministral 3, and Mixtral."""

from functools import partial

from msgspec.structs import replace

from engine.models.families.config_fields import (
    expert_layers,
    llama_spec,
    rope_parameters,
    uniform_windows,
)
from engine.models.families.family import Config, Family
from engine.models.families.tensor_names import (
    MIXTRAL_NAMES,
    NOT_TEXT,
    TEXT_PREFIXES,
    llama_weights,
    named_weights,
)
from engine.models.families.towers import read_tower
from engine.models.spec import ModelSpec, TemperatureSpec


def _mistral(config: Config) -> ModelSpec:
    return replace(llama_spec(config), windows=uniform_windows(config))


def _ministral_3(config: Config) -> ModelSpec:
    spec = replace(_mistral(config), vision=read_tower(config))
    scale, (rope,) = rope_parameters(config).get("llama_4_scaling_beta"), spec.distinct_ropes
    if scale is None:
        return spec
    step = rope.original_max_position_embeddings
    return replace(spec, attention_temperature=TemperatureSpec(scale=scale, step=step))


def _mixtral(config: Config) -> ModelSpec:
    return replace(expert_layers(llama_spec(config), config), windows=uniform_windows(config))


FAMILY = Family(architectures=("MistralForCausalLM",), spec=_mistral, weights=llama_weights)

MINISTRAL_3 = Family(
    architectures=("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"),
    spec=_ministral_3,
    weights=llama_weights,
    text_prefixes=TEXT_PREFIXES,
    not_text=NOT_TEXT,
)

MIXTRAL = Family(
    architectures=("MixtralForCausalLM",),
    spec=_mixtral,
    weights=partial(named_weights, names=MIXTRAL_NAMES),
)
