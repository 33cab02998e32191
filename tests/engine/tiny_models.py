"""Tiny random checkpoints of every architecture, written by transformers, its reference."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.shared.messages import EncoderInput
from tests.engine.transformers_images import shown_to

MAX_MODEL_LEN = 256

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": MAX_MODEL_LEN,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": MAX_MODEL_LEN,
    "short_factor": [1.0 + 0.1 * i for i in range(12)],
    "long_factor": [4.0 + 0.5 * i for i in range(12)],
}
_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_GLM4_MOE: dict[str, Any] = {
    "head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
_NO_GROUPS = {"n_group": 1, "topk_group": 1}
_DEEPSEEK_YARN = {**_YARN_ROPE, "mscale": 0.8, "mscale_all_dim": 0.6}
_GPT_OSS: dict[str, Any] = {
    "head_dim": 32,
    "sliding_window": 20,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "swiglu_limit": 0.5,
    "rope_parameters": {**_YARN_ROPE, "truncate": False},
}
_LLAMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "intermediate_size": 48,
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 20,
    "floor_scale": 16,
    "attn_scale": 0.5,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-llama3": ("Llama", {"tie_word_embeddings": True, "rope_parameters": _LLAMA3_ROPE}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "vocab_size": 300}),
    "llama-deep": ("Llama", {"num_hidden_layers": 5}),
    "llama-yarn": ("Llama", {"rope_parameters": _YARN_ROPE, "head_dim": 32}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral-window": ("Mistral", {"sliding_window": 20}),
    "qwen2": ("Qwen2", {}),
    "qwen2-some-windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 32}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": ("Qwen3Moe", {**_MOE, "head_dim": 32, "norm_topk_prob": True}),
    "qwen3-moe-many": ("Qwen3Moe", {**_MOE, "num_experts": 16, "norm_topk_prob": True}),
    "qwen3-moe-blocks": (
        "Qwen3Moe",
        {**_MOE, "num_experts": 16, "moe_intermediate_size": 128, "norm_topk_prob": True},
    ),
    "qwen3-moe-some-dense": (
        "Qwen3Moe",
        {**_MOE, "mlp_only_layers": [1], "norm_topk_prob": False, "tie_word_embeddings": True},
    ),
    "qwen3-moe-deep": (
        "Qwen3Moe",
        {
            **_MOE,
            "num_hidden_layers": 4,
            "mlp_only_layers": [2],
            "tie_word_embeddings": True,
            "norm_topk_prob": True,
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 32,
            "sliding_window": 20,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma3-long": (
        "Gemma3",
        {
            "head_dim": 32,
            "num_hidden_layers": 6,
            "sliding_window": 512,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "query_pre_attn_scalar": 24,
            "max_position_embeddings": 8448,
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 50}),
    "phi3-partial": (
        "Phi3",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": MAX_MODEL_LEN,
            "rope_parameters": {**_LONG_ROPE, "partial_rotary_factor": 0.75},
        },
    ),
    "phi3-long": (
        "Phi3",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                **_LONG_ROPE,
                "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": _YARN_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 2.0,
        },
    ),
    "granite-moe": (
        "GraniteMoe",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "cohere": ("Cohere", {"logit_scale": 0.5}),
    "cohere-normed": ("Cohere", {"logit_scale": 0.5, "use_qk_norm": True}),
    "cohere2": (
        "Cohere2",
        {
            "logit_scale": 0.5,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "glm": ("Glm", {"head_dim": 32}),
    "glm4": ("Glm4", {"head_dim": 32}),
    "glm4-moe": ("Glm4Moe", {**_GLM4_MOE, "attention_bias": True}),
    "glm4-moe-normed": (
        "Glm4Moe",
        {**_GLM4_MOE, "use_qk_norm": True, "n_group": 4, "topk_group": 2},
    ),
    "glm4-moe-blocks": ("Glm4Moe", {**_GLM4_MOE, "moe_intermediate_size": 64}),
    "gpt-oss": ("GptOss", _GPT_OSS),
    "deepseek2": (
        "DeepseekV2",
        {
            **_DEEPSEEK,
            "topk_method": "group_limited_greedy",
            "attention_bias": True,
            "rope_parameters": _DEEPSEEK_YARN,
        },
    ),
    "deepseek2-lite": ("DeepseekV2", {**_DEEPSEEK, "q_lora_rank": None}),
    "deepseek3": ("DeepseekV3", {**_DEEPSEEK, "rope_parameters": _DEEPSEEK_YARN}),
    "deepseek3-halves": (
        "DeepseekV3",
        {**_DEEPSEEK, "rope_interleave": False, "norm_topk_prob": False, **_NO_GROUPS},
    ),
    "gpt-oss-mxfp4": ("GptOss", _GPT_OSS),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 32,
            "tie_word_embeddings": True,
            "rope_parameters": {**_YARN_ROPE, "llama_4_scaling_beta": 0.5},
        },
    ),
    "minimax-m2": (
        "MiniMaxM2",
        {
            "head_dim": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "ernie4.5": ("Ernie4_5", {"head_dim": 32, "use_bias": True}),
    "ernie4.5-moe": (
        "Ernie4_5_Moe",
        {
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_intermediate_size": 48,
            "moe_layer_start_index": 1,
        },
    ),
    "llama4": (
        "Llama4",
        {
            **_LLAMA4,
            "rope_parameters": {**_LLAMA3_ROPE, "high_freq_factor": 1.0},
        },
    ),
    "llama4-blocks": (
        "Llama4",
        {
            **_LLAMA4,
            "intermediate_size": 64,
            "rope_parameters": {**_LLAMA3_ROPE, "high_freq_factor": 1.0},
        },
    ),
    "llama4-some-dense": (
        "Llama4",
        {
            **_LLAMA4,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 2,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
        },
    ),
}


_VISION = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 4,
}
_LARGE_PATCHES = {**_VISION, "patch_size": 8}
IMAGE_TOKEN = 255
_QWEN_VISION = {
    "depth": 4,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_heads": 4,
    "patch_size": 4,
    "window_size": 16,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [1, 3],
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
MODELS_WITH_VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "smolvlm": ("SmolVLM", {"scale_factor": 4}),
    "idefics3": ("Idefics3", {"scale_factor": 2}),
    "qwen2-vl": (
        "Qwen2VL",
        {
            "vision_config": {
                "depth": 2, "embed_dim": 48, "hidden_size": 64, "mlp_ratio": 2, "num_heads": 4,
                "patch_size": 4,
            },
            "text_config": {**_SIZES, "rope_parameters": _MROPE},
        },
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        {
            "vision_config": _QWEN_VISION,
            "text_config": {**_SIZES, "rope_parameters": _MROPE},
        },
    ),
    "gemma3-vision": (
        "Gemma3",
        {
            "vision_config": {"model_type": "siglip_vision_model", **_VISION},
            "text_config": {**_SIZES, **MODELS["gemma3"][1]},
            "mm_tokens_per_image": 16,
        },
    ),
    "mistral3": (
        "Mistral3",
        {
            "vision_config": {"model_type": "pixtral", **_VISION},
            "text_config": {"model_type": "mistral", **_SIZES},
            "tie_word_embeddings": False,
        },
    ),
    "llava": ("Llava", {"vision_config": {"model_type": "clip_vision_model", **_LARGE_PATCHES}}),
    "llava-siglip": (
        "Llava",
        {
            "vision_config": {"model_type": "siglip_vision_model", **_LARGE_PATCHES},
            "text_config": {"model_type": "qwen2", **_SIZES},
            "vision_feature_select_strategy": "full",
        },
    ),
    "llava-pixtral": (
        "Llava",
        {
            "vision_config": {"model_type": "pixtral", **_LARGE_PATCHES},
            "text_config": {"model_type": "mistral", **_SIZES},
            "vision_feature_select_strategy": "full",
            "vision_feature_layer": -1,
        },
    ),
    "internvl": (
        "InternVL",
        {
            "vision_config": {"model_type": "internvl_vision", **_VISION},
            "text_config": {"model_type": "qwen3", **_SIZES, "head_dim": 32},
            "tie_word_embeddings": False,
        },
    ),
}  # fmt: skip
"""A family, and what its configuration has in place of and beside a Llama and `_VISION`."""


class Checkpoint:
    """A saved random model and its reference implementation."""

    def __init__(self, directory: Path, reference: Any) -> None:
        self.directory = directory
        self.reference = reference

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Return [tokens, vocab] from one pass over the whole sequence."""
        logits: torch.Tensor = self.reference(torch.tensor([token_ids])).logits[0]
        return logits

    @torch.inference_mode()
    def logits_with_images(
        self, token_ids: list[int], images: Sequence[EncoderInput]
    ) -> torch.Tensor:
        """Return the same of a sequence that shows images."""
        tokens, given = torch.tensor([token_ids]), shown_to(self.reference, images)
        # Generated tokens never stand for images.
        types = torch.zeros_like(tokens)
        for image in images:
            types[0, image.position : image.position + image.num_tokens] = 1
        kind = self.reference.config.model_type
        named = {
            "qwen2_vl": "mm_token_type_ids",
            "qwen2_5_vl": "mm_token_type_ids",
            "gemma3": "token_type_ids",
        }
        if kind in named:
            given[named[kind]] = types
        logits: torch.Tensor = self.reference(tokens, **given).logits[0]
        return logits

    @torch.inference_mode()
    def greedy(self, token_ids: list[int], count: int, guess: list[int] | None = None) -> list[int]:
        """Return the continuation that the reference generates.

        Args:
            guess: what it may be; if the reference chooses each of these tokens after those before
                it, as one pass tells, they need not be generated.
        """
        if guess is not None and len(guess) == count:
            chosen = self.logits(token_ids + guess[:-1])[len(token_ids) - 1 :].argmax(-1)
            if chosen.tolist() == guess:
                return guess
        cache, fed, tokens = None, torch.tensor([token_ids]), []
        for _ in range(count):
            out = self.reference(fed, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            tokens.append(int(out.logits[0, -1].argmax()))
            fed = torch.tensor([tokens[-1:]])
        return tokens


def save_tiny_model(name: str, directory: Path, seed: int, **options: Any) -> Checkpoint:
    """Write a named model; keywords go to `save_pretrained`."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    family, settings = MODELS[name]
    is_part = family in ("Gemma3", "Llama4")
    config_class = f"{family}TextConfig" if is_part else f"{family}Config"
    config = getattr(transformers, config_class)(**{**_SIZES, **settings})
    model = getattr(transformers, f"{family}ForCausalLM")
    # Only this one caps scores.
    options_of = {"attn_implementation": "eager"} if family == "Gemma2" else {}
    reference = model._from_config(config, **options_of).eval()
    randomize(reference, seed)
    packed = pack_experts(reference, seed) if name.endswith("-mxfp4") else {}
    reference.save_pretrained(directory, **options)
    if packed:
        _replace(directory, packed)
    return Checkpoint(directory, reference)


def save_tiny_model_with_vision(name: str, directory: Path, seed: int) -> Checkpoint:
    """Write a named vision model."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    family, settings = MODELS_WITH_VISION[name]
    parts = {"text_config": {"model_type": "llama", **_SIZES}, "vision_config": _VISION}
    config = getattr(transformers, f"{family}Config")(
        **{**parts, **settings}, image_token_id=IMAGE_TOKEN
    )
    reference = getattr(transformers, f"{family}ForConditionalGeneration")._from_config(config)
    reference.eval()
    randomize(reference, seed)
    reference.save_pretrained(directory)
    preparation = {
        "rescale_factor": 1 / 255, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.5] * 3,
        "max_pixels": 32 * 32,
    }  # fmt: skip
    (directory / "preprocessor_config.json").write_text(json.dumps(preparation))
    return Checkpoint(directory, reference)


def pack_experts(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """Give GPT-OSS random experts in MXFP4; return these by the names that they are stored by."""
    generator = torch.Generator().manual_seed(seed)
    stored: dict[str, torch.Tensor] = {}
    for number, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            parameter = getattr(layer.mlp.experts, name)
            experts, inputs, outputs = parameter.shape
            shape = (experts, outputs, inputs // 32)
            blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(121, 125, shape, generator=generator, dtype=torch.uint8)
            with torch.no_grad():
                parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            path = f"model.layers.{number}.mlp.experts.{name}"
            stored |= {f"{path}_blocks": blocks, f"{path}_scales": scales}
    return stored


def _replace(directory: Path, packed: dict[str, torch.Tensor]) -> None:
    """Store packed experts in place of those that transformers wrote."""
    path, config = directory / "model.safetensors", directory / "config.json"
    unpacked = {name.removesuffix("_blocks") for name in packed}
    kept = {name: each for name, each in load_file(path).items() if name not in unpacked}
    save_file({**kept, **packed}, path, metadata={"format": "pt"})
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    content = {**json.loads(config.read_text()), "quantization_config": quantization}
    config.write_text(json.dumps(content))


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Draw all weights: norms around one, others around zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.15 * noise)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.copy_(0.15 * torch.randn(buffer.shape, generator=generator))
