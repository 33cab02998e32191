"""Small GGUF files, written by the reference implementation of the format.

Tensors and keys are named, ordered and shifted as by llama.cpp's converter.
"""

import json
import re
from collections.abc import Iterator
from math import log
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

Array = np.ndarray[Any, Any]

_PERMUTED = ("llama", "granite", "granitemoe", "mistral3", "smollm3")
_KEYS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "logit_scale": "logit_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "moe_num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_k": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "moe_num_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "norm_topk_prob": "expert_weights_norm",
    "routed_scaling_factor": "expert_weights_scale",
    "first_k_dense_replace": "leading_dense_block_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "v_head_dim": "attention.value_length_mla",
    "qk_rope_head_dim": "rope.dimension_count",
}
"""Of config.json."""
_ROPE_KEYS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "attention_factor": "yarn_attn_factor",
}
_EXPERTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def byte_tokens() -> list[str]:
    """Return the characters that represent the 256 bytes in byte-level tokenizers."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) for byte in shown] + [chr(256 + i) for i in range(len(hidden))]


def write_gguf(
    path: Path,
    source: Path,
    architecture: str,
    kind: Kind = Kind.F32,
    metadata: dict[str, Any] | None = None,
    divisors: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Write a saved model as a GGUF file; return its tensors as read back from the file.

    Args:
        source: a directory with one safetensors file, whose names are kept in what is returned.
        kind: storage type of matrices; other tensors are in float32.
        metadata: additional keys.
        divisors: of the frequencies of rotary positions.
    """
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    own = {f"{architecture}.{key}": each for key, each in _described(config, architecture).items()}
    own[f"{architecture}.block_count"] = config["num_hidden_layers"]
    for key, value in {**own, **(metadata or {})}.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*byte_tokens()[:-1], "ab"])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    rope = config["rope_parameters"]
    for length in ("short", "long"):
        if rope.get("rope_type") == "longrope":
            factors = np.array(rope[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors.numpy())
    back = _write_tensors(writer, load_file(source / "model.safetensors"), config, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return back


def _described(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Return the keys of metadata, without the architecture before them."""
    found = {key: config[name] for name, key in _KEYS.items() if config.get(name) is not None}
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    if "intermediate_size_mlp" in config:
        found["expert_feed_forward_length"] = config["intermediate_size"]
        found["feed_forward_length"] = config["intermediate_size_mlp"]
    elif "expert_count" in found:
        found.setdefault("expert_feed_forward_length", config["intermediate_size"])
    if "kv_lora_rank" in config:
        rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
        found |= {
            "attention.head_count_kv": 1,
            "attention.key_length": rank + rotated,
            "attention.value_length": rank,
            "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        }
    else:
        share = config["rope_parameters"].get("partial_rotary_factor") or 1.0
        found["rope.dimension_count"] = int(width * share)
    if "layer_types" in config and architecture == "olmo2" and config.get("sliding_window"):
        found["attention.sliding_window_pattern"] = [
            each == "sliding_attention" for each in config["layer_types"]
        ]
    return {**found, **_rope(config, architecture)}


def _rope(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    given = config["rope_parameters"]
    rope = given.get("full_attention", given)
    found = {"rope.freq_base": rope.get("rope_theta", 10000.0)}
    if "sliding_attention" in given:
        found["rope.freq_base_swa"] = given["sliding_attention"]["rope_theta"]
    by = rope.get("rope_type", "default")
    if by not in ("linear", "yarn", "longrope"):
        return found
    found["rope.scaling.type"] = by
    if by == "longrope":
        original = config.get("original_max_position_embeddings", config["max_position_embeddings"])
        stretched = config["max_position_embeddings"] / original
        found["rope.scaling.original_context_length"] = original
        found["rope.scaling.attn_factor"] = (1 + log(stretched) / log(original)) ** 0.5
        return found
    found |= {f"rope.scaling.{key}": rope[name] for name, key in _ROPE_KEYS.items() if name in rope}
    if "mscale_all_dim" in rope:
        shrunk = 0.1 if architecture == "deepseek2" else 1.0
        found["rope.scaling.yarn_log_multiplier"] = shrunk * rope["mscale_all_dim"]
    if "llama_4_scaling_beta" in rope:
        found["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    return found


def _write_tensors(
    writer: gguf.GGUFWriter, tensors: dict[str, torch.Tensor], config: dict[str, Any], kind: Kind
) -> dict[str, torch.Tensor]:
    (number,) = (each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == writer.arch)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    stacks: dict[str, dict[int, Array]] = {}
    back = {}
    for name, tensor in tensors.items():
        if name.endswith(("_blocks", "_scales")):
            continue
        values = tensor.float().numpy()
        stored = kind if values.ndim == 2 and not name.endswith(".gate.weight") else Kind.F32
        data = gguf.quantize(values, stored)
        back[name] = torch.from_numpy(gguf.dequantize(data, stored).copy())
        if stored is not Kind.F32 and "experts" not in name:
            data = _ordered(data, name, config, writer.arch)
            writer.add_tensor(_name(name, names), data, raw_dtype=stored)
            continue
        expert = re.search(r"experts\.(\d+)\.(\w+)\.weight$", name)
        if expert is not None:
            matrix = _EXPERTS.get(expert[2], expert[2]).removesuffix("_proj")
            stack = f"blk.{name.split('.')[2]}.ffn_{matrix}_exps.weight"
            stacks.setdefault(stack, {})[int(expert[1])] = data
            continue
        for own, part in _parts(name, values, config, writer.arch):
            part = _ordered(part, own, config, writer.arch)
            writer.add_tensor(_name(own, names), np.ascontiguousarray(part))
    for name, parts in stacks.items():
        whole = np.stack([parts[number] for number in range(len(parts))])
        writer.add_tensor(name, whole, raw_dtype=kind)
    for name, blocks in tensors.items():
        if name.endswith("_blocks"):
            scales = tensors[name.replace("_blocks", "_scales")]
            _write_packed(writer, name, blocks.numpy(), scales.numpy())
    return back


def _name(name: str, names: gguf.TensorNameMap) -> str:
    if name.startswith("blk."):
        return name
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def _parts(
    name: str, values: Array, config: dict[str, Any], architecture: str
) -> Iterator[tuple[str, Array]]:
    """Yield what a tensor is stored as."""
    layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    if "e_score_correction_bias" in name:
        yield f"{layer}.exp_probs_b.bias", values
    elif name.endswith(".sinks"):
        yield f"{layer}.attn_sinks.weight", values
    elif name.endswith("kv_b_proj.weight"):
        plain, wide = config["qk_nope_head_dim"], config["v_head_dim"]
        heads = values.reshape(config["num_attention_heads"], plain + wide, -1)
        yield f"{layer}.attn_k_b.weight", heads[:, :plain].swapaxes(1, 2)
        yield f"{layer}.attn_v_b.weight", heads[:, plain:]
    elif name.endswith("input_linear.weight"):
        for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
            yield f"{layer}.ffn_{part}_exps.weight", half
    elif "experts.gate_up_proj" in name:
        is_bias = name.endswith("_bias")
        rows = values if is_bias else values.swapaxes(1, 2)
        halves = np.split(rows, 2, axis=1) if architecture == "llama4" else (
            rows[:, 0::2], rows[:, 1::2]
        )  # fmt: skip
        for part, half in zip(("gate", "up"), halves, strict=True):
            yield f"{layer}.ffn_{part}_exps.{'bias' if is_bias else 'weight'}", half
    elif name.endswith("experts.down_proj"):
        yield f"{layer}.ffn_down_exps.weight", values.swapaxes(1, 2)
    elif name.endswith("experts.down_proj_bias"):
        yield f"{layer}.ffn_down_exps.bias", values
    elif architecture.startswith("gemma") and name.endswith("norm.weight"):
        yield name, values + 1
    else:
        yield name, values


def _write_packed(writer: gguf.GGUFWriter, name: str, blocks: Array, scales: Array) -> None:
    """Write experts in MXFP4: of each byte of a block, one half is 16 elements behind the other."""
    layer, is_down = name.split(".")[2], "down_proj" in name
    values = np.stack((blocks & 15, blocks >> 4), axis=-1).reshape(*blocks.shape[:-1], 32)
    packed = values[..., :16] | (values[..., 16:] << 4)
    data = np.concatenate((scales[..., None], packed), axis=-1)
    data = data.reshape(*data.shape[:2], -1)
    parts = {"down": data} if is_down else {"gate": data[:, 0::2], "up": data[:, 1::2]}
    for part, each in parts.items():
        stack = f"blk.{layer}.ffn_{part}_exps.weight"
        writer.add_tensor(stack, np.ascontiguousarray(each), raw_dtype=Kind.MXFP4)


def _ordered(rows: Array, name: str, config: dict[str, Any], architecture: str) -> Array:
    """Return queries and keys as llama.cpp has them: rows that rotate together side by side."""
    if architecture not in _PERMUTED or not re.search(r"[qk]_proj\.", name):
        return rows
    heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)
