"""Configurations with unusual values, drawn from the fields of transformers' classes."""

import dataclasses
import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple

from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.models.families.config import HARMLESS
from engine.models.families.registry import FAMILIES
from scripts.write_fallback_doc import TARGET
from tests.engine.fallback_models import known_fields, tiny_settings

LENGTHS = (5, 70, 700)
_POSITIONS = 1024
_ATTEMPTS = 200
_HEADS = ((4, 4, 16), (4, 2, 16), (6, 2, 12), (3, 1, 20), (5, 5, 8), (8, 1, 10), (2, 2, 32))
"""Queries, keys, size of each."""
_CHOICES: dict[str, tuple[Any, ...]] = {
    "sliding_window": (3, 9, 50, None),
    "max_window_layers": (0, 1, 2),
    "num_hidden_layers": (2, 3, 4),
    "num_experts_per_tok": (1, 2, 3),
    "num_experts_per_token": (1, 2, 3),
    "moe_k": (1, 2, 3),
    "moe_topk": (1, 2, 3),
    "n_shared_experts": (1, 2),
    "moe_num_shared_experts": (1, 2),
    "first_k_dense_replace": (0, 1, 2),
    "decoder_sparse_step": (1, 2),
    "mlp_only_layers": ([], [1], [0]),
    "moe_layer_start_index": (0, 1),
    "moe_layer_end_index": (-1, 1),
    "moe_layer_interval": (1, 2),
    "interleave_moe_layer_step": (1, 2),
    "no_rope_layer_interval": (2, 3, 4),
    "attention_chunk_size": (5, 16),
    "floor_scale": (8, 64),
    "q_lora_rank": (None, 24),
    "topk_method": ("greedy", "group_limited_greedy"),
    "query_pre_attn_scalar": (8, 24),
    "tie_word_embeddings": (True, False),
    "swiglu_limit": (0.5, 7.0),
    "attn_logit_softcapping": (None, 5.0),
    "final_logit_softcapping": (None, 10.0),
    "hidden_act": ("silu", "silu", "silu", "gelu_pytorch_tanh"),
    "attention_multiplier": (0.1, 0.2, 0.5),
    "moe_norm_min": (1e-12, 1e-12, 1e-12, 0.5),
    "mlp_bias": (False, False, True),
}
"""Of keys that have few values, or whose values are other than a class's default is."""
_GROUPS = ((1, 1), (2, 1), (2, 2), (4, 2))
_DROPPABLE = {
    "sliding_window", "max_window_layers", "layer_types", "rms_norm_eps", "rope_theta",
    "rope_parameters", "rope_scaling", "tie_word_embeddings", "attention_bias",
    "norm_topk_prob", "routed_scaling_factor", "hidden_act", "use_sliding_window",
    "no_rope_layers", "partial_rotary_factor", "query_pre_attn_scalar",
}  # fmt: skip
"""What may be absent, to mean what the class says."""
_DROPPED = 0.15
_SCALES = (0.5, 1.0, 2.0)
_BASES = (100.0, 10000.0, 500000.0)
_KINDS = ("default", "default", "linear", "llama3", "yarn", "yarn")
_RARE = 0.06
"""Of types that are not served, or not without a family."""
_SHARES = (0.25, 0.3, 0.5, 0.75, 1.0)


class Case(NamedTuple):
    """A config.json, and what it is called."""

    name: str
    config: dict[str, Any]


def model_types() -> Iterator[str]:
    """Return the types of every family, and of every class that is served without one."""
    served = TARGET.read_text(encoding="utf-8").split("## Not served")[0]
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if name.endswith("ForConditionalGeneration") or model_type == "llama4":
            continue  # its text model has a type of its own
        if name in FAMILIES or f"| {name} |" in served:
            yield model_type


def draw(model_type: str, number: int, seed: int) -> Case | None:
    """Return a configuration that the class takes; None if none was found."""
    rng = random.Random(f"{seed} {model_type} {number}")
    for _ in range(_ATTEMPTS):
        config = _draw(model_type, rng)
        try:
            CONFIG_MAPPING[model_type].from_dict(deepcopy(config))
        except Exception:  # of many kinds: values that do not suit each other
            continue
        return Case(f"{model_type}-{number}", config)
    return None


def _draw(model_type: str, rng: random.Random) -> dict[str, Any]:
    config_class = CONFIG_MAPPING[model_type]
    known, default = known_fields(config_class), config_class()
    config: dict[str, Any] = {
        **tiny_settings(model_type),
        "model_type": model_type,
        "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]],
        # Some classes want numbers, others none.
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), rng.choice((None, 0))),
    }
    for key in ("max_position_embeddings", "n_positions"):
        if key in config:
            config[key] = _POSITIONS
    _heads(config, known, rng)
    base = {field.name for field in dataclasses.fields(PretrainedConfig)}
    for key in sorted(known - base - HARMLESS - {"rope_parameters"}):
        value = getattr(config_class, key, None)
        if key in _CHOICES:
            config[key] = rng.choice(_CHOICES[key])
        elif isinstance(value, bool) and key not in config:
            config[key] = value != (rng.random() < 0.25)
        elif isinstance(value, float) and key not in config and value:
            config[key] = rng.choice((1e-6, 1e-3)) if "eps" in key else value * rng.choice(_SCALES)
    if {"layer_types", "sliding_window"} <= known and "use_sliding_window" not in known:
        config["sliding_window"] = config.get("sliding_window") or 9  # their classes need one
    if "n_group" in known:
        config["n_group"], config["topk_group"] = rng.choice(_GROUPS)
        config |= {key: 8 for key in ("n_routed_experts", "num_experts") if key in config}
    if "layer_types" in config:
        config["layer_types"] = _layer_types(config, rng)
    if getattr(default, "rope_parameters", None):
        config |= _rope(default.rope_parameters, config, rng)
    if "rotary_dim" in known and config.get("head_dim"):
        config["rotary_dim"] = config["head_dim"] // 2
    return {
        key: value
        for key, value in config.items()
        if key not in _DROPPABLE or rng.random() > _DROPPED
    }


def _heads(config: dict[str, Any], known: set[str], rng: random.Random) -> None:
    if not {"num_attention_heads", "hidden_size"} <= config.keys() or "kv_lora_rank" in known:
        return
    heads, kv_heads, size = rng.choice(_HEADS)
    config["num_attention_heads"] = heads
    if "num_key_value_heads" in known:
        config["num_key_value_heads"] = kv_heads
    if "head_dim" in known and rng.random() < 0.5:
        config["head_dim"] = size
    else:
        config.pop("head_dim", None)
        config["hidden_size"] = heads * size
        if "head_dim" in known:
            config["head_dim"] = rng.choice((None, size))


def _layer_types(config: dict[str, Any], rng: random.Random) -> list[str] | None:
    if config.get("sliding_window") is None or rng.random() < 0.5:
        return None
    kinds = ("full_attention", "sliding_attention")
    return [rng.choice(kinds) for _ in range(config["num_hidden_layers"])]


def _rope(default: dict[str, Any], config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return rotary embeddings of any type, as newer or older files have them."""
    if "full_attention" in default:
        if rng.random() < 0.5 or config["architectures"][0] not in FAMILIES:
            whole = _one_rope({}, config, rng)
            local = {"rope_type": "default", "rope_theta": rng.choice(_BASES)}
            return {"rope_parameters": {"full_attention": whole, "sliding_attention": local}}
        whole = _one_rope({}, config, rng)
        return {"rope_theta": whole.pop("rope_theta"), "rope_scaling": whole}
    rope = _one_rope(default, config, rng)
    original = {}
    if rope["rope_type"] in ("yarn", "llama3") and rng.random() < 0.3:
        original = {"original_max_position_embeddings": rng.choice((32, 128))}
    if rng.random() < 0.5:
        return {"rope_parameters": rope, **original}
    old: dict[str, Any] = {
        key: rope.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in rope
    }
    return {**old, "rope_scaling": rope, **original}


def _one_rope(
    default: dict[str, Any], config: dict[str, Any], rng: random.Random
) -> dict[str, Any]:
    kinds = _KINDS if rng.random() > _RARE else ("dynamic", "longrope")
    if config["architectures"][0] in FAMILIES:
        kinds = (*kinds, "longrope")
    kind = rng.choice(kinds)
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": rng.choice(_BASES)}
    share = 1.0
    if "partial_rotary_factor" in default:
        share = rng.choice(_SHARES)
        rope["partial_rotary_factor"] = share
    if kind != "default":
        rope["factor"] = rng.choice((2.0, 4.0))
    if kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = rng.choice((16, 64, 256))
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "yarn":
        rope |= rng.choice(
            ({}, {"mscale": 0.8, "mscale_all_dim": 0.6}, {"beta_fast": 16.0, "beta_slow": 2.0},
             {"attention_factor": 1.3}, {"truncate": False})
        )  # fmt: skip
    if kind in ("linear", "llama3") and rng.random() < 0.3:
        rope["mscale_all_dim"] = 0.6
    if kind == "longrope":
        size = config.get("qk_rope_head_dim") or config.get("head_dim")
        size = size or config.get("hidden_size", 64) // config.get("num_attention_heads", 4)
        count = int(size * share) // 2
        # All lengths are on one side of it: which side a sequence is on is another matter.
        rope["original_max_position_embeddings"] = rng.choice((4, _POSITIONS))
        rope["short_factor"] = [1.0 + 0.1 * i for i in range(count)]
        rope["long_factor"] = [2.0 + 0.3 * i for i in range(count)]
    return rope
