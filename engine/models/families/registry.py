"""Maps architectures to families."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar

from msgspec.structs import replace

from engine.models.families import (
    cohere,
    deepseek,
    ernie4_5,
    gemma2,
    gemma3,
    glm,
    gpt_oss,
    granite,
    llama,
    llava,
    minimax_m2,
    mistral,
    olmo2,
    phi3,
    qwen,
    qwen2_vl,
    smollm3,
    smolvlm,
)
from engine.models.families.family import Family
from engine.models.spec import UnsupportedModel
from engine.shared.plugins import BadPlugin, instance_of, load_plugin, offered

T = TypeVar("T")
U = TypeVar("U")

_FAMILIES = (
    llama.FAMILY,
    llama.LLAMA_4,
    llava.FAMILY,
    mistral.FAMILY,
    mistral.MINISTRAL_3,
    mistral.MIXTRAL,
    minimax_m2.FAMILY,
    qwen.QWEN_2,
    qwen2_vl.FAMILY,
    qwen.QWEN_3,
    qwen.QWEN_3_MOE,
    gemma2.FAMILY,
    gemma3.FAMILY,
    phi3.FAMILY,
    olmo2.FAMILY,
    granite.FAMILY,
    granite.MOE,
    smollm3.FAMILY,
    smolvlm.FAMILY,
    cohere.FAMILY,
    glm.FAMILY,
    glm.MOE,
    gpt_oss.FAMILY,
    deepseek.FAMILY,
    ernie4_5.FAMILY,
)

FAMILIES = {architecture: family for family in _FAMILIES for architecture in family.architectures}
"""Keyed by `architectures` of config.json."""

_PLUGINS = "swell.model_families"
"""Entry points are named by architecture too; built-in families take precedence."""


@cache
def family_of(architecture: str) -> Family:
    """Return the built-in or plugin family of a supported architecture.

    Raises:
        BadPlugin: the plugin cannot be used.
    """
    known = FAMILIES.get(architecture)
    return known or load_plugin(
        _PLUGINS, architecture, "config.json:", partial(_checked, architecture)
    )


def _checked(architecture: str, found: object) -> Family:
    """Return a plugin's family, whose functions name it if they fail."""
    family = instance_of(Family)(found)
    if family.reads_as and family.reads_as not in FAMILIES:
        raise ValueError(f"reads_as: {family.reads_as!r} is not a built-in architecture")

    def named(part: str, function: Callable[[T], U]) -> Callable[[T], U]:
        def call(argument: T) -> U:
            try:
                return function(argument)
            except UnsupportedModel:
                raise
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                raise BadPlugin(
                    f"config.json: {architecture}: the plugin's `{part}` failed: {reason}"
                ) from error

        return call

    return replace(
        family, spec=named("spec", family.spec), weights=named("weights", family.weights)
    )


def architecture_of(config: dict[str, Any]) -> str:
    """Return the supported architecture that serves a model.

    Raises:
        UnsupportedModel: there is none; lists the supported architectures.
    """
    named = config.get("architectures") or []
    names = []
    for name in map(str, named):
        names.append(name)
        for suffix in ("ForSequenceClassification", "Model"):  # the same model without an LM head
            if name.endswith(suffix):
                names.append(name.removesuffix(suffix) + "ForCausalLM")
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
