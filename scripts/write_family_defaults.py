"""Writes engine/models/families/defaults.json: the defaults of keys missing from a config.json.

Defaults and aliases of keys come from transformers' configuration class of every architecture with
a family, and of every model_type that has a class of its own but another's architecture. A key of
such a class that the family does not read must have its default value.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.models.families.config import HARMLESS
from engine.models.families.registry import FAMILIES

TARGET = Path(__file__).parent.parent / "engine" / "models" / "families" / "defaults.json"


def architectures() -> list[str]:
    """Return the architectures whose text models have their own classes."""
    wrappers = "ForConditionalGeneration"
    others = {name for name in FAMILIES if name.endswith(wrappers)}
    qwen_vl = {name for name in others if name.startswith(("Qwen2VL", "Qwen2_5_VL"))}
    return [name for name in FAMILIES if name not in others - qwen_vl]


def configuration_class(architecture: str) -> Any:
    """Return transformers' configuration class of a text model."""
    model: Any = getattr(transformers, architecture)
    return model.config_class.sub_configs.get("text_config", model.config_class)


def other_types() -> dict[str, Any]:
    """Return the configuration classes of types with the architecture of another, by type."""
    return {
        kind: CONFIG_MAPPING[kind]
        for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        if name in FAMILIES
        and not CONFIG_MAPPING[kind].sub_configs
        and CONFIG_MAPPING[kind] is not configuration_class(name)
    }


def class_defaults(made: Any) -> dict[str, Any]:
    """Return a class's defaults of keys that affect computation, and its key aliases."""
    base = {field.name for field in dataclasses.fields(transformers.PretrainedConfig)}
    fields = {
        field.name: field.default
        for field in dataclasses.fields(made)
        if field.name not in base | HARMLESS
    }
    aliases = {name: key for name, key in made.attribute_map.items() if key not in HARMLESS}
    keys = {aliases.get(name, name): value for name, value in fields.items()}
    return {"aliases": aliases, "keys": dict(sorted((keys | _rope(made)).items()))}


def _rope(made: Any) -> dict[str, Any]:
    """Return the default rotary embedding, and defaults of keys missing from a given one."""
    absent = made().rope_parameters
    if "full_attention" in absent:
        # The class sets separate RoPE bases for full-attention and sliding-window layers.
        whole, local = absent["full_attention"], absent["sliding_attention"]
        bases = {"rope_theta": whole["rope_theta"], "rope_local_base_freq": local["rope_theta"]}
        return {"rope_parameters": None, **bases}
    plain = made(rope_parameters={"rope_type": "default"}).rope_parameters
    keys = {key: value for key, value in plain.items() if key != "rope_type"}
    if absent == plain:
        return {**keys, "rope_parameters": None}
    # A value derived from another key is not a default.
    depends = {"max_position_embeddings"}
    if made(rope_theta=1.0).rope_parameters["rope_theta"] == 1.0:
        depends.add("rope_theta")
    return {
        **keys,
        "rope_parameters": {key: each for key, each in absent.items() if key not in depends},
    }


def render() -> str:
    """Return the file's content, with one line per architecture or type."""
    classes = {name: configuration_class(name) for name in architectures()} | other_types()
    lines = [f"{json.dumps(name)}: {json.dumps(class_defaults(classes[name]))}" for name in classes]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
