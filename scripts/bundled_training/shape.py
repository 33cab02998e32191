"""Sizes of the model, and its configuration as transformers reads it."""

import dataclasses
from typing import Any

from .chat_format import END_OF_TEXT, SPECIAL_TOKENS, TURN_END


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of the model, under the names of transformers' Qwen3MoeConfig."""

    vocab_size: int = 2048
    hidden_size: int = 192
    num_hidden_layers: int = 6
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            **dataclasses.asdict(self),
            # The dense layers' width; there are none, but readers of the file expect the key.
            "intermediate_size": 2 * self.moe_intermediate_size * self.num_experts_per_tok,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "decoder_sparse_step": 1,
            "eos_token_id": SPECIAL_TOKENS.index(TURN_END),
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "output_router_logits": False,
            "pad_token_id": SPECIAL_TOKENS.index(END_OF_TEXT),
            "rope_scaling": None,
            "router_aux_loss_coef": 0.001,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
        }
