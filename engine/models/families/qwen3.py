"""Qwen 3: queries and keys are normalized head by head."""

from msgspec.structs import replace

from engine.models.families.family import Config, Family
from engine.models.families.placing import llama_weights
from engine.models.families.qwen2 import qwen_windows
from engine.models.families.reading import llama_spec
from engine.models.spec import ModelSpec


def _spec(config: Config) -> ModelSpec:
    return replace(llama_spec(config), qk_norm="head", windows=qwen_windows(config))


FAMILY = Family(architectures=("Qwen3ForCausalLM",), spec=_spec, weights=llama_weights)
