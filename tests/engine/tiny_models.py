"""Tiny random checkpoints of every architecture, written by transformers, its reference."""

from pathlib import Path
from typing import Any

import torch
import transformers

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
_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-llama3": ("Llama", {"tie_word_embeddings": True, "rope_parameters": _LLAMA3_ROPE}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "vocab_size": 300}),
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
    "qwen3-moe-some-dense": (
        "Qwen3Moe",
        {**_MOE, "mlp_only_layers": [1], "norm_topk_prob": False, "tie_word_embeddings": True},
    ),
}


class Checkpoint:
    """A saved random model and its reference implementation."""

    def __init__(self, directory: Path, reference: Any) -> None:
        self.directory = directory
        self.reference = reference

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Return [tokens, vocab] from one pass over the whole sequence."""
        return self.reference(torch.tensor([token_ids])).logits[0]

    @torch.inference_mode()
    def greedy(self, token_ids: list[int], count: int) -> list[int]:
        """Return the continuation that the reference generates."""
        cache, fed, tokens = None, torch.tensor([token_ids]), []
        for _ in range(count):
            out = self.reference(fed, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            tokens.append(int(out.logits[0, -1].argmax()))
            fed = torch.tensor([tokens[-1:]])
        return tokens


def save_tiny_model(name: str, directory: Path, seed: int, **options: Any) -> Checkpoint:
    """Write a named model; keywords go to `save_pretrained`."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    family, settings = _MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**_SIZES, **settings})
    reference = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    _randomize(reference, seed)
    reference.save_pretrained(directory, **options)
    return Checkpoint(directory, reference)


def _randomize(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.15 * noise)
