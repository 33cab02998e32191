"""Ministral 3 and Mistral Small 3, of which the text models are served: queries may be tempered."""

from typing import Any

from msgspec.structs import replace

from engine.models.families.family import Config, Family
from engine.models.families.placing import llama_weights
from engine.models.families.reading import layer_windows, llama_spec, number
from engine.models.spec import ModelSpec, TemperatureSpec

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
}
"""What configs of Ministral 3 may leave out, beside the next."""
_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _spec(config: Config) -> ModelSpec:
    if config.get("model_type") == "ministral3":
        config = {**_DEFAULTS, **config}
        if not (config.get("rope_parameters") or config.get("rope_scaling")):
            config["rope_parameters"] = _ROPE
    spec = replace(llama_spec(config, eps=1e-5), windows=layer_windows(config))
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    (rope,) = spec.distinct_ropes
    if given.get("llama_4_scaling_beta") is None:
        return spec
    scale, step = number(given, "llama_4_scaling_beta", 0.0), rope.original_max_position_embeddings
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
