"""Llama 2 and 3, and what has its architecture."""

from engine.models.families.family import Family
from engine.models.families.placing import llama_weights
from engine.models.families.reading import llama_spec

FAMILY = Family(architectures=("LlamaForCausalLM",), spec=llama_spec, weights=llama_weights)
