"""What a GGUF file says of the network, in the words of a Hugging Face config.json."""

import struct
from pathlib import Path
from typing import Any

from engine.shared.gguf.reader import BadGguf, Gguf

_FREQUENCIES = "rope_freqs.weight"
_MAX_FREQUENCIES = 1 << 12

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
"""By `general.architecture`; Mistral's and Mixtral's is llama too."""

_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "feed_forward_length": "intermediate_size",
}
_EXPERT_KEYS = {
    "expert_count": "num_local_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_ENDINGS = ("eos_token_id", "eot_token_id", "eom_token_id")


def config_of(gguf: Gguf, path: Path) -> dict[str, Any]:
    """Return the config of the network.

    Raises:
        BadGguf: it is none of those that are served, or the file does not describe it.
        OSError: the file cannot be read.
    """
    found = gguf.metadata
    kind = found.get("general.architecture")
    if not isinstance(kind, str) or kind not in _ARCHITECTURES:
        raise BadGguf(
            f"{path}: the architecture {kind!r} is not served from GGUF files; served are "
            + ", ".join(_ARCHITECTURES)
        )
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise BadGguf(f"{path}: there is no token_embd.weight")
    names = {**_KEYS, **_EXPERT_KEYS}
    config: dict[str, Any] = {
        ours: found[f"{kind}.{theirs}"]
        for theirs, ours in names.items()
        if f"{kind}.{theirs}" in found
    }
    config |= {
        "architectures": [_architecture(kind, config)],
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_output.bias" in gguf.tensors,
        "norm_topk_prob": True,
        "eos_token_id": ending_ids(found),
    }
    width = found.get(f"{kind}.rope.dimension_count")
    head_dim = config.get("head_dim") or _head_dim(config, path)
    if width is not None and width != head_dim:
        raise BadGguf(f"{path}: heads of which only {width} of {head_dim} dimensions are rotated")
    scaling = _scaling(gguf, kind, config, path)
    return config if scaling is None else {**config, "rope_scaling": scaling}


def ending_ids(metadata: dict[str, Any]) -> list[int]:
    """Return the tokens that end an answer."""
    found = [metadata.get(f"tokenizer.ggml.{name}") for name in _ENDINGS]
    return list(dict.fromkeys(each for each in found if isinstance(each, int)))


def _architecture(kind: str, config: dict[str, Any]) -> str:
    if kind == "llama" and config.get("num_local_experts"):
        return "MixtralForCausalLM"
    return _ARCHITECTURES[kind]


def _head_dim(config: dict[str, Any], path: Path) -> int:
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        raise BadGguf(f"{path}: width and number of heads are missing, or differ between layers")
    return hidden // heads


def _scaling(gguf: Gguf, kind: str, config: dict[str, Any], path: Path) -> dict[str, Any] | None:
    prefix = f"{kind}.rope.scaling."
    scaling = {
        key.removeprefix(prefix): value
        for key, value in gguf.metadata.items()
        if key.startswith(prefix)
    }
    if _FREQUENCIES in gguf.tensors:
        # Llama 3's stretching comes as what each frequency is divided by, as LongRoPE's does.
        divisors = _divisors(gguf, path)
        return {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": config.get("max_position_embeddings"),
        }
    if scaling.get("type") in (None, "none"):
        return None
    renamed = {"rope_type": scaling["type"], "factor": scaling.get("factor")}
    original = scaling.get("original_context_length")
    if original is not None:
        renamed["original_max_position_embeddings"] = original
    return renamed


def _divisors(gguf: Gguf, path: Path) -> list[float]:
    info = gguf.tensors[_FREQUENCIES]
    if info.storage.name != "F32" or len(info.shape) != 1 or info.shape[0] > _MAX_FREQUENCIES:
        raise BadGguf(f"{path}: {_FREQUENCIES} is not a short list of F32")
    with path.open("rb") as file:
        file.seek(info.offset)
        return list(struct.unpack(f"<{info.shape[0]}f", file.read(info.num_bytes)))
