"""What was computed otherwise than by transformers once, and a few drawn configurations."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.compare import compare
from tests.parity.drawn import Case, draw

_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 256,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    "head_dim": 8, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20,
    "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
AGREEING: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral without a base": ("mixtral", "MixtralForCausalLM", _EXPERTS),
    "olmo 3 without a base": ("olmo3", "Olmo3ForCausalLM", {"sliding_window": 9}),
    "gpt-oss without rope_parameters": (
        "gpt_oss", "GptOssForCausalLM", {**_EXPERTS, "sliding_window": 9},
    ),
    "qwen 2 without max_window_layers": (
        "qwen2", "Qwen2ForCausalLM",
        {"num_hidden_layers": 30, "use_sliding_window": True, "sliding_window": 9},
    ),
    "two original lengths": (
        "llama", "LlamaForCausalLM",
        {"rope_scaling": _YARN, "original_max_position_embeddings": 256},
    ),
    "mscale_all_dim of linear embeddings": (
        "deepseek_v3", "DeepseekV3ForCausalLM",
        {**_LATENT, "rope_scaling": {"rope_type": "linear", "factor": 4.0, "mscale_all_dim": 0.7}},
    ),
    "an odd number of rotated dimensions": (
        "glm", "GlmForCausalLM", {"head_dim": 20, "partial_rotary_factor": 0.25},
    ),
    "a type whose defaults are not its architecture's": ("internlm3", "LlamaForCausalLM", {}),
    "a cap that Gemma 3 does not have": (
        "gemma3_text", "Gemma3ForCausalLM", {"attn_logit_softcapping": 5.0, "sliding_window": 9},
    ),
    "windows of masks": (
        "phimoe", "PhimoeForCausalLM", {**_EXPERTS, "sliding_window": 9},
    ),
    "windows of masks in some layers": (
        "qwen2_moe", "Qwen2MoeForCausalLM",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24, "use_sliding_window": True,
            "sliding_window": 9, "max_window_layers": 1,
        },
    ),
}  # fmt: skip


def case(name: str, model_type: str, architecture: str, changes: dict[str, Any]) -> Case:
    named = {"model_type": model_type, "architectures": [architecture]}
    return Case(name, {**_SIZES, **named, **changes})


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", AGREEING)
def test_log_probabilities_equal_transformers(name: str, tmp_path: Path) -> None:
    outcome = compare(case(name, *AGREEING[name]), tmp_path)
    assert outcome.kind == "agrees", outcome.detail


@pytest.mark.parametrize("model_type", ["qwen3_moe", "glm4_moe", "starcoder2"])
def test_a_drawn_configuration_is_computed_or_refused(model_type: str, tmp_path: Path) -> None:
    drawn = draw(model_type, 0, seed=1)
    assert drawn is not None
    assert drawn == draw(model_type, 0, seed=1)
    outcome = compare(drawn, tmp_path)
    assert outcome.kind in ("agrees", "refused"), outcome.detail
