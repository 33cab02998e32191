"""Tiny random models of every causal language model type in transformers."""

import inspect
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.engine.tiny_models import Checkpoint, randomize

WINDOW = 20
VOCAB_SIZE = 256
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "word_embed_proj_dim": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "n_inner": 96,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_kv_heads": 4,
    "head_dim": 16,
    "kv_channels": 16,
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 1,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 48,
    "expert_ffn_hidden_size": 48,
    "shared_expert_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    # latents
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 32,
    "v_head_dim": 24,
    # made for the number of layers, which is another here
    "layer_types": None,
    "mlp_layer_types": None,
    "no_rope_layers": None,
    "is_decoder": True,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_OF_TYPE: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "n_heads": 4,
        "n_layers": 2,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": None,
    },
    "dots1": {"n_shared_experts": 1},
}
"""Required settings without a default in some model types."""
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def known_fields(config_class: Any) -> set[str]:
    """Return the keys that a configuration class has."""
    known = {*inspect.signature(config_class).parameters}
    return known | {
        field for each in config_class.__mro__ for field in getattr(each, "__annotations__", {})
    }


def tiny_settings(model_type: str) -> dict[str, Any]:
    """Return small values for all sizes of a configuration."""
    config_class = CONFIG_MAPPING[model_type]
    known = known_fields(config_class)
    names = {getattr(config_class, "attribute_map", {}).get(name, name) for name in _SIZES}
    sizes = {name: _SIZES[name] for name in _SIZES if name in known & names}
    if "num_key_value_heads" in known:
        default = config_class()
        alike = default.num_key_value_heads == getattr(default, "num_attention_heads", None)
        sizes["num_key_value_heads"] = 4 if alike else 2
    return {**sizes, **_OF_TYPE.get(model_type, {})}


def tiny_config(model_type: str, **settings: Any) -> Any:
    """Return a configuration of transformers with small sizes wherever it has such."""
    config = CONFIG_MAPPING[model_type](**{**tiny_settings(model_type), **settings})
    drop_special_tokens(config)
    return config


def drop_special_tokens(config: Any) -> None:
    """Remove token ids outside a small vocabulary."""
    for name in _SPECIAL:
        token = getattr(config, name, None)
        if token is None or (isinstance(token, int) and token < VOCAB_SIZE):
            continue
        try:
            setattr(config, name, None)
        except Exception:  # some classes require a number
            setattr(config, name, 0)


def save_fallback_model(
    model_type: str, directory: Path, seed: int = 1, **settings: Any
) -> Checkpoint:
    """Write a tiny random model of a transformers model type."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        reference = model_class._from_config(
            tiny_config(model_type, **settings), attn_implementation="eager", dtype=torch.float32
        ).eval()
    randomize(reference, seed)
    reference.save_pretrained(directory)
    return Checkpoint(directory, reference)
