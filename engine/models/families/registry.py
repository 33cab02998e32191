"""Which family serves which architecture."""

from functools import cache
from typing import Any

from engine.models.families import (
    cohere,
    deepseek,
    ernie4_5,
    gemma2,
    gemma3,
    glm4,
    glm4_moe,
    gpt_oss,
    granite,
    granite_moe,
    llama,
    llama4,
    minimax_m2,
    ministral3,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen2_vl,
    qwen3,
    qwen3_moe,
    smollm3,
    smolvlm,
)
from engine.models.families.family import Family
from engine.models.spec import UnsupportedModel
from engine.shared.plugins import instance_of, load_plugin, offered

_MODULES = (
    llama,
    llama4,
    mistral,
    ministral3,
    mixtral,
    minimax_m2,
    qwen2,
    qwen2_vl,
    qwen3,
    qwen3_moe,
    gemma2,
    gemma3,
    phi3,
    olmo2,
    granite,
    granite_moe,
    smollm3,
    smolvlm,
    cohere,
    glm4,
    glm4_moe,
    gpt_oss,
    deepseek,
    ernie4_5,
)

FAMILIES: dict[str, Family] = {
    architecture: module.FAMILY
    for module in _MODULES
    for architecture in module.FAMILY.architectures
}
"""By architecture, as in `architectures` of config.json."""

_PLUGINS = "swell.model_families"
"""Entry points are named by architectures, too; none is in place of a family of ours."""


@cache
def family_of(architecture: str) -> Family:
    """Return the family that serves one of `FAMILIES`, or one that a plugin serves.

    Raises:
        BadPlugin: the plugin cannot be used.
    """
    known = FAMILIES.get(architecture)
    return known or load_plugin(_PLUGINS, architecture, "config.json:", instance_of(Family))


def architecture_of(config: dict[str, Any]) -> str:
    """Return the architecture by which a model is served.

    Raises:
        UnsupportedModel: there is none, with the list of those that are served.
    """
    named = config.get("architectures") or []
    names = [each for name in named for each in (str(name), *_generating(str(name)))]
    for known in names:
        if known in FAMILIES:
            return known
    plugins = offered(_PLUGINS)
    for known in names:
        if known in plugins:
            return known
    found = ", ".join(named) or f"none (model_type {config.get('model_type')!r})"
    supported = ", ".join([*FAMILIES, *plugins])
    raise UnsupportedModel(f"architecture {found} is not supported; supported are: {supported}")


def _generating(name: str) -> list[str]:
    """Return what the same model is called with an LM head, if it is a model without one."""
    return [
        name.removesuffix(suffix) + "ForCausalLM"
        for suffix in ("ForSequenceClassification", "Model")
        if name.endswith(suffix)
    ]
