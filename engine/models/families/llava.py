"""LLaVA and InternVL: text models of other families, and vision encoders of transformers."""

from msgspec.structs import replace

from engine.models.families import llama, mistral, qwen
from engine.models.families.family import Config, Family
from engine.models.families.tensor_names import NOT_TEXT, TEXT_PREFIXES, llama_weights
from engine.models.families.towers import read_tower
from engine.models.spec import ModelSpec, UnsupportedModel

_TEXT = {
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "qwen2": qwen.QWEN_2,
    "qwen3": qwen.QWEN_3,
}
"""Families of text models by `model_type`; all have Llama's names of tensors."""


def _spec(config: Config) -> ModelSpec:
    kind = str(config.get("model_type"))
    if kind not in _TEXT:
        raise UnsupportedModel(
            f"config.json: a text_config of model_type {kind!r} is not supported, only "
            f"{', '.join(_TEXT)}"
        )
    return replace(_TEXT[kind].spec(config), vision=read_tower(config))


FAMILY = Family(
    architectures=("LlavaForConditionalGeneration", "InternVLForConditionalGeneration"),
    spec=_spec,
    weights=llama_weights,
    ignored=qwen.QWEN_2.ignored,
    text_prefixes=TEXT_PREFIXES,
    not_text=NOT_TEXT,
)
