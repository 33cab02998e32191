"""A GGUF file's description of the network, as a Hugging Face config.json."""

import struct
from collections.abc import Mapping
from math import log
from pathlib import Path
from typing import Any

import msgspec

from engine.shared.gguf.reader import BadGguf, Gguf

_MAX_FREQUENCIES = 1 << 12
_MXFP4_EXPERTS = "blk.0.ffn_down_exps.weight"

_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "feed_forward_length": "intermediate_size",
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
}
_READ = (
    "attention.value_length", "rope.dimension_count", "vocab_size", "rope.scale_linear",
    "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.attn_factor", "rope.scaling.finetuned", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_log_multiplier", "expert_gating_func", "nextn_predict_layers",
)  # fmt: skip
"""Keys that are read elsewhere, or that do not affect the computation."""
_ENDINGS = ("eos_token_id", "eot_token_id", "eom_token_id")


class _Architecture(msgspec.Struct, frozen=True):
    """How transformers names a llama.cpp architecture and its keys."""

    name: str
    keys: Mapping[str, str] = {}
    """Metadata keys to config.json names, in addition to or overriding `_KEYS`."""
    defaults: Mapping[str, Any] = {}
    """llama.cpp's defaults of absent keys, where they differ from the transformers class's."""
    rotates_part: bool = False
    """Whether `rope.dimension_count` can be less than the head dimension."""


_WINDOW = {"attention.sliding_window": "sliding_window"}
_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_COHERE = {"logit_scale": "logit_scale", "attention.layer_norm_epsilon": "layer_norm_eps"}
_GEMMA = {
    **_WINDOW,
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base_swa": "rope_local_base_freq",
}
_GROUPED = {
    "expert_count": "n_routed_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}
_NO_GROUPS = {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}
_OF_EXPERTS = {"expert_feed_forward_length": "intermediate_size"}

_ARCHITECTURES = {
    # Also Mistral and Mixtral.
    "llama": _Architecture("LlamaForCausalLM", _OF_EXPERTS),
    "llama4": _Architecture(
        "Llama4ForCausalLM",
        {
            **_OF_EXPERTS,
            "feed_forward_length": "intermediate_size_mlp",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
    ),
    "mistral3": _Architecture("Ministral3ForCausalLM", {"attention.temperature_scale": ""}),
    "qwen2": _Architecture("Qwen2ForCausalLM"),
    "qwen3": _Architecture("Qwen3ForCausalLM"),
    "qwen3moe": _Architecture(
        "Qwen3MoeForCausalLM",
        {"expert_feed_forward_length": "moe_intermediate_size"},
        {"norm_topk_prob": True},
    ),
    "gemma2": _Architecture(
        "Gemma2ForCausalLM",
        _GEMMA,
        {
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": _Architecture(
        "Gemma3ForCausalLM", _GEMMA, {"sliding_window": None, "rope_local_base_freq": 10000.0}
    ),
    "phi3": _Architecture(
        "Phi3ForCausalLM",
        {**_WINDOW, "rope.scaling.original_context_length": "original_max_position_embeddings"},
        {"sliding_window": None},
        rotates_part=True,
    ),
    "olmo2": _Architecture("Olmo2ForCausalLM", _WINDOW),
    "granite": _Architecture("GraniteForCausalLM", _GRANITE),
    "granitemoe": _Architecture("GraniteMoeForCausalLM", {**_GRANITE, **_OF_EXPERTS}),
    "smollm3": _Architecture("SmolLM3ForCausalLM"),
    "command-r": _Architecture("CohereForCausalLM", _COHERE),
    "cohere2": _Architecture("Cohere2ForCausalLM", {**_COHERE, **_WINDOW}),
    "chatglm": _Architecture("GlmForCausalLM", rotates_part=True),
    "glm4": _Architecture("Glm4ForCausalLM", rotates_part=True),
    "glm4moe": _Architecture("Glm4MoeForCausalLM", _GROUPED, _NO_GROUPS, rotates_part=True),
    "gpt-oss": _Architecture("GptOssForCausalLM", {**_WINDOW, **_OF_EXPERTS}),
    "deepseek2": _Architecture(
        "DeepseekV2ForCausalLM",
        {
            **_GROUPED,
            "attention.q_lora_rank": "q_lora_rank",
            "attention.kv_lora_rank": "kv_lora_rank",
            "attention.key_length_mla": "qk_head_dim",
            "attention.value_length": "v_head_dim",
            "attention.value_length_mla": "v_head_dim",
            "rope.dimension_count": "qk_rope_head_dim",
        },
        {**_NO_GROUPS, "q_lora_rank": None},
    ),
    "minimax-m2": _Architecture("MiniMaxM2ForCausalLM", _OF_EXPERTS, rotates_part=True),
    "ernie4_5": _Architecture("Ernie4_5ForCausalLM"),
    "ernie4_5-moe": _Architecture(
        "Ernie4_5_MoeForCausalLM",
        {
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "expert_shared_feed_forward_length": "",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
        {"moe_num_shared_experts": 0},
    ),
}
"""By `general.architecture`."""


def config_of(gguf: Gguf, path: Path) -> dict[str, Any]:
    """Return the network's config.

    Raises:
        BadGguf: the architecture is unsupported, or the metadata is incomplete.
        OSError: the file cannot be read.
    """
    found, tensors = gguf.metadata, gguf.tensors
    kind = str(found.get("general.architecture"))
    architecture = _ARCHITECTURES.get(kind)
    if architecture is None:
        raise BadGguf(
            f"{path}: the architecture {kind!r} is not served from GGUF files; served are "
            + ", ".join(_ARCHITECTURES)
        )
    if isinstance(parts := found.get("split.count"), int) and parts > 1:
        raise BadGguf(
            f"{path}: this is one of {parts} files of a model, which are not read; "
            "llama-gguf-split --merge joins them"
        )
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise BadGguf(f"{path}: there is no token_embd.weight")
    stated = {
        key.removeprefix(f"{kind}."): value
        for key, value in found.items()
        if key.startswith(f"{kind}.")
    }
    keys = {**_KEYS, **architecture.keys}
    has_bias = "blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors
    config: dict[str, Any] = {
        "rope_theta": 10000.0,
        **architecture.defaults,
        **{
            own_name: stated[gguf_name]
            for gguf_name, own_name in keys.items()
            if own_name and gguf_name in stated
        },
        # Unknown keys are passed on, so that the config's reader can report them.
        **{
            f"{kind}.{key}": value
            for key, value in stated.items()
            if key not in (*keys, *_READ) and not isinstance(value, list)
        },
        "architectures": [architecture.name],
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": has_bias,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "eos_token_id": ending_ids(found),
    }
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int) or not 1 <= layers <= len(tensors):
        raise BadGguf(f"{path}: {kind}.block_count is {layers!r}, with {len(tensors)} tensors")
    # Absent keys have llama.cpp's defaults.
    if not config.get("head_dim"):
        hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
        if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
            raise BadGguf(
                f"{path}: width and number of heads are missing, or differ between layers"
            )
        config["head_dim"] = hidden // heads
    try:
        _adapt(config, kind, gguf)
        _windows(config, stated)
        _check_rotation(config, architecture, stated, path)
        scaling = _scaling(gguf, kind, config, path)
    except (ArithmeticError, LookupError, TypeError) as error:
        raise BadGguf(f"{path}: keys of {kind} are missing or of another type: {error}") from error
    return config if scaling is None else {**config, "rope_scaling": scaling}


def _adapt(config: dict[str, Any], kind: str, gguf: Gguf) -> None:
    """Set config entries that follow from tensors and sizes, where llama.cpp has no key."""
    tensors, head_dim = gguf.tensors, config["head_dim"]
    is_normed = "blk.0.attn_q_norm.weight" in tensors
    if kind == "llama" and config.get("num_local_experts"):
        config["architectures"] = ["MixtralForCausalLM"]
    elif kind == "llama4":
        # The variant with 128 experts has no such norms.
        config["use_qk_norm"] = config.get("num_local_experts") == 16
    elif kind in ("gemma2", "gemma3"):
        # The 27-billion-parameter variants differ.
        is_largest = config.get("num_hidden_layers") == {"gemma2": 46, "gemma3": 62}[kind]
        width = config["hidden_size"] // config["num_attention_heads"] if is_largest else head_dim
        config["query_pre_attn_scalar"] = width
    elif kind == "olmo2" and config.get("sliding_window"):
        config |= {
            "architectures": ["Olmo3ForCausalLM"],
            "rope_local_base_freq": config["rope_theta"],
        }
    elif kind in ("granite", "granitemoe"):
        config.setdefault("attention_multiplier", head_dim**-0.5)
    elif kind in ("command-r", "glm4moe"):
        config["use_qk_norm"] = is_normed
    elif kind in ("ernie4_5", "ernie4_5-moe"):
        config["use_bias"] = config["attention_bias"]
    elif kind == "gpt-oss" and tensors[_MXFP4_EXPERTS].storage.name == "MXFP4":
        config["quantization_config"] = {"quant_method": "mxfp4"}
    elif kind == "deepseek2":
        # Files store what llama.cpp caches. Older ones have no key_length_mla.
        width = config.pop("qk_head_dim", config.pop("head_dim"))
        config["qk_nope_head_dim"] = width - config["qk_rope_head_dim"]
        config["num_key_value_heads"] = config["num_attention_heads"]
        if any(name.endswith(".exp_probs_b.bias") for name in tensors):
            config["architectures"] = ["DeepseekV3ForCausalLM"]
        elif config["n_group"] > 1:
            config["topk_method"] = "group_limited_greedy"
    if kind == "glm4moe":
        # The count includes the multi-token prediction layers.
        config["num_hidden_layers"] -= gguf.metadata.get(f"{kind}.nextn_predict_layers", 0)


def _windows(config: dict[str, Any], stated: dict[str, Any]) -> None:
    if not config.get("sliding_window"):
        if "sliding_window" in config:
            config["sliding_window"] = None
        return
    pattern = stated.get("attention.sliding_window_pattern")
    if isinstance(pattern, int):
        layers = range(config["num_hidden_layers"])
        pattern = [(layer + 1) % pattern != 0 for layer in layers]
    if isinstance(pattern, list):
        config["layer_types"] = [
            "sliding_attention" if slides else "full_attention" for slides in pattern
        ]


def _check_rotation(
    config: dict[str, Any], architecture: _Architecture, stated: dict[str, Any], path: Path
) -> None:
    head_dim = config.get("head_dim")
    if head_dim is None:
        return  # latent attention
    rotated = stated.get("rope.dimension_count", head_dim)
    if architecture.rotates_part and isinstance(rotated, int):
        config["partial_rotary_factor"] = rotated / head_dim
        rotated = head_dim
    values = stated.get("attention.value_length", head_dim)
    for key, width in (("rope.dimension_count", rotated), ("attention.value_length", values)):
        if width != head_dim:
            raise BadGguf(f"{path}: {key} is {width}; only the whole head, {head_dim}, is served")


def frequency_divisors(gguf: Gguf, path: Path) -> dict[str, list[float]]:
    """Return the divisors of the RoPE frequencies that the file stores, if any.

    Keys: `freqs` (for sequences of any length), or `factors_short` and `factors_long`.

    Raises:
        BadGguf: a divisor tensor is not a short F32 vector.
        OSError: the file cannot be read.
    """
    found = {}
    for name in ("freqs", "factors_short", "factors_long"):
        info = gguf.tensors.get(f"rope_{name}.weight")
        if info is None:
            continue
        if info.storage.name != "F32" or len(info.shape) != 1 or info.shape[0] > _MAX_FREQUENCIES:
            raise BadGguf(f"{path}: rope_{name}.weight is not a short list of F32")
        with path.open("rb") as file:
            file.seek(info.offset)
            found[name] = list(struct.unpack(f"<{info.shape[0]}f", file.read(info.num_bytes)))
    return found


def ending_ids(metadata: dict[str, Any]) -> list[int]:
    """Return the token ids that end an answer."""
    found = [metadata.get(f"tokenizer.ggml.{name}") for name in _ENDINGS]
    return list(dict.fromkeys(each for each in found if isinstance(each, int)))


def _scaling(gguf: Gguf, kind: str, config: dict[str, Any], path: Path) -> dict[str, Any] | None:
    """Return the config's rope_scaling by llama.cpp's rules, None if there is no scaling."""
    prefix = f"{kind}.rope.scaling."
    stated = {
        key.removeprefix(prefix): value
        for key, value in gguf.metadata.items()
        if key.startswith(prefix)
    }
    length = config.get("max_position_embeddings")
    factor = stated.get("factor") or gguf.metadata.get(f"{kind}.rope.scale_linear") or 1.0
    by, attention = stated.get("type", "linear"), stated.get("attn_factor", 1.0)
    divisors = frequency_divisors(gguf, path)
    if "factors_long" in divisors or by == "longrope":
        return {
            "rope_type": "longrope",
            "short_factor": divisors.get("factors_short"),
            "long_factor": divisors.get("factors_long"),
            "factor": 1.0,
            "attention_factor": attention,
            "original_max_position_embeddings": stated.get("original_context_length", length),
        }
    is_stretched = by != "none" and (factor != 1.0 or attention != 1.0)
    if divisors and not is_stretched:
        # Llama 3's scaling is stored as per-frequency divisors, like LongRoPE's.
        return {
            "rope_type": "longrope",
            "short_factor": divisors["freqs"],
            "long_factor": divisors["freqs"],
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": length,
        }
    if not is_stretched:
        return None
    if divisors:
        raise BadGguf(f"{path}: rope_freqs.weight and {prefix}* together are not served")
    if by == "yarn":
        return _yarn(gguf, kind, stated, factor, attention)
    if by != "linear" or attention != 1.0:
        raise BadGguf(f"{path}: {prefix}type {by!r} with attn_factor {attention} is not served")
    return {"rope_type": by, "factor": factor}


def _yarn(
    gguf: Gguf, kind: str, stated: dict[str, Any], factor: float, attention: float
) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    if "original_context_length" in stated:
        scaling["original_max_position_embeddings"] = stated["original_context_length"]
    for gguf_name, own_name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if gguf_name in stated:
            scaling[own_name] = stated[gguf_name]
    multiplier = stated.get("yarn_log_multiplier")
    if multiplier:
        # DeepSeek's multiplier is stored multiplied by 0.1.
        scale = multiplier * 10 if kind == "deepseek2" else multiplier
        scaling |= {"mscale": scale, "mscale_all_dim": scale}
    else:
        own = attention * (0.1 * log(factor) + 1.0)
        scaling["attention_factor"] = stated.get("yarn_attn_factor", own)
    if kind == "gpt-oss":
        scaling["truncate"] = False
    temperature = gguf.metadata.get(f"{kind}.attention.temperature_scale")
    if temperature is not None:
        scaling["llama_4_scaling_beta"] = temperature
    return scaling
