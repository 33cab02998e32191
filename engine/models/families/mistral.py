"""Mistral: Llama, in some versions with a sliding window."""

from msgspec.structs import replace

from engine.models.families.family import Config, Family
from engine.models.families.placing import llama_weights
from engine.models.families.reading import llama_spec, uniform_windows
from engine.models.spec import ModelSpec


def _spec(config: Config) -> ModelSpec:
    return replace(llama_spec(config), windows=uniform_windows(config))


FAMILY = Family(architectures=("MistralForCausalLM",), spec=_spec, weights=llama_weights)
