"""Small GGUF files, written by the reference implementation of the format."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_EXPERTS = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}


def byte_tokens() -> list[str]:
    """Return the characters that byte-level tokenizers write for the 256 bytes."""
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
    """Write a saved model as a GGUF file; return its tensors as the file gives them back.

    Args:
        source: a directory with one safetensors file, whose names are kept in what is returned.
        kind: how matrices are stored; all else is in float32.
        metadata: keys beside those of the model's config.
        divisors: of the frequencies of rotary positions.
    """
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    heads = config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(
            config.get("moe_intermediate_size") or config["intermediate_size"]
        )
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*byte_tokens()[:-1], "ab"])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors.numpy())
    back = _write_tensors(writer, load_file(source / "model.safetensors"), config, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return back


def _write_tensors(
    writer: gguf.GGUFWriter, tensors: dict[str, torch.Tensor], config: dict[str, Any], kind: Kind
) -> dict[str, torch.Tensor]:
    stacks: dict[str, dict[int, np.ndarray[Any, Any]]] = {}
    back = {}
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        stored = kind if values.ndim == 2 and not name.endswith(".gate.weight") else Kind.F32
        data = gguf.quantize(values, stored)
        rounded = gguf.dequantize(data, stored)
        back[name] = torch.from_numpy(rounded.copy())
        if ".experts." in name:
            prefix, _, part = name.partition(".experts.")
            number, matrix, _ = part.split(".")
            stack = f"blk.{prefix.split('.')[2]}.{_EXPERTS[matrix]}.weight"
            stacks.setdefault(stack, {})[int(number)] = data
            continue
        if writer.arch == "llama" and ("q_proj" in name or "k_proj" in name):
            key = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            data = _paired(data, config[key])
        writer.add_tensor(_name(name), data, raw_dtype=stored)
    for name, parts in stacks.items():
        whole = np.stack([parts[number] for number in range(len(parts))])
        writer.add_tensor(name, whole, raw_dtype=kind)
    return back


def _name(name: str) -> str:
    stem, _, ending = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{ending}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{ending}"


def _paired(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Return rows as llama.cpp has them: those that rotate together side by side."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)
