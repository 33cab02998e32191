"""Granite 3: Llama with multipliers of embeddings, scores, what is added, and logits."""

from msgspec.structs import replace

from engine.models.families.family import Config, Family
from engine.models.families.placing import llama_weights
from engine.models.families.reading import llama_spec, number
from engine.models.spec import ModelSpec


def granite_spec(config: Config) -> ModelSpec:
    """Return the spec of a dense model.

    Raises:
        UnsupportedModel: naming the setting that cannot be honoured, or that is missing.
    """
    return replace(
        llama_spec(config),
        embedding_scale=number(config, "embedding_multiplier", 1.0),
        attention_scale=number(config, "attention_multiplier", 1.0),
        residual_scale=number(config, "residual_multiplier", 1.0),
        logits_scale=1 / number(config, "logits_scaling", 1.0),
    )


FAMILY = Family(architectures=("GraniteForCausalLM",), spec=granite_spec, weights=llama_weights)
