"""Builds a decoder from a checkpoint, layer by layer.

Each tensor is copied from the mapped file into its place in a fused weight, and each fused weight
is packed and dropped before the next is made, so that memory stays near the model's own size.
"""

import logging
from pathlib import Path

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.models.attention import PagedAttention
from engine.models.checkpoint import (
    Checkpoint,
    DummyCheckpoint,
    ExpertNames,
    SafetensorsCheckpoint,
    expert_names,
)
from engine.models.decoder import AttentionWeights, Decoder, DecoderWeights, LayerWeights
from engine.models.hf_config import ModelSpec, MoeSpec, UnsupportedModel
from engine.models.layers import Linear, prepare_linear
from engine.models.moe import (
    Expert,
    Experts,
    GroupedExperts,
    Router,
    SparseMlp,
    StackedExperts,
)
from engine.models.rotary import rotary_table

logger = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def open_checkpoint(directory: Path, spec: ModelSpec, config: ModelConfig) -> Checkpoint:
    """Open the weights that the settings ask for.

    Raises:
        CheckpointError: the files do not hold what the model's config says.
    """
    if config.load_format == "dummy":
        return DummyCheckpoint(directory, spec, config.seed, _dummy_dtype(spec, config))
    return SafetensorsCheckpoint(directory, spec)


def _dummy_dtype(spec: ModelSpec, config: ModelConfig) -> torch.dtype:
    return _DTYPES[spec.dtype or "float32" if config.dtype == "auto" else config.dtype]


def compute_dtype(spec: ModelSpec, config: ModelConfig, checkpoint: Checkpoint) -> torch.dtype:
    """Return the type of weights and activations: as set, else the config's, else as stored."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    return _DTYPES[spec.dtype] if spec.dtype else checkpoint.dtype


def model_length(spec: ModelSpec, config: ModelConfig) -> int:
    """Return the longest sequence in tokens.

    Raises:
        UnsupportedModel: the settings ask for more than the model was made for.
    """
    longest = spec.max_position_embeddings
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        raise UnsupportedModel(
            f"--max-model-len {config.max_model_len} is more than the {longest} positions "
            "that the model was made for"
        )
    return config.max_model_len


class DecoderLoader:
    """Assembles the weights of one model on one device."""

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
    ) -> None:
        self._spec = spec
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._max_model_len = max_model_len

    def load(self) -> Decoder:
        """Read all weights and return the model."""
        spec = self._spec
        embedding = self._copy("model.embed_tokens.weight")
        tied = spec.tie_word_embeddings
        weights = DecoderWeights(
            embedding=embedding,
            layers=[self._layer(index) for index in range(spec.num_layers)],
            norm=self._copy("model.norm.weight"),
            lm_head=prepare_linear(embedding) if tied else self._linear("lm_head.weight"),
            rotary=rotary_table(
                spec.rope, spec.head_dim, self._max_model_len, self._dtype, self._device
            ),
        )
        attention = PagedAttention(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=self._dtype,
            device=self._device,
        )
        return Decoder(spec, weights, attention)

    def _layer(self, index: int) -> LayerWeights:
        prefix = f"model.layers.{index}."
        return LayerWeights(
            input_norm=self._copy(prefix + "input_layernorm.weight"),
            attention=self._attention(prefix + "self_attn."),
            mlp_norm=self._copy(prefix + "post_attention_layernorm.weight"),
            mlp=self._sparse_mlp(prefix)
            if self._spec.is_sparse(index)
            else self._mlp(prefix + "mlp."),
            window=self._spec.windows[index],
        )

    def _attention(self, prefix: str) -> AttentionWeights:
        spec = self._spec
        projections = [f"{prefix}{name}_proj" for name in "qkv"]
        bias = [f"{name}.bias" for name in projections] if spec.qkv_bias else []
        norm = None
        if spec.qk_norm:
            query, key = self._copy(prefix + "q_norm.weight"), self._copy(prefix + "k_norm.weight")
            norm = torch.cat((query.expand(spec.num_heads, -1), key.expand(spec.num_kv_heads, -1)))
        return AttentionWeights(
            qkv=self._linear(*(f"{name}.weight" for name in projections), bias=bias),
            output=self._linear(
                prefix + "o_proj.weight", bias=[prefix + "o_proj.bias"] if spec.output_bias else []
            ),
            qk_norm=norm,
        )

    def _mlp(self, prefix: str) -> Expert:
        names = [prefix + "gate_proj", prefix + "up_proj", prefix + "down_proj"]
        bias = [f"{name}.bias" for name in names] if self._spec.mlp_bias else []
        return Expert(
            self._linear(f"{names[0]}.weight", f"{names[1]}.weight", bias=bias[:2]),
            self._linear(f"{names[2]}.weight", bias=bias[2:]),
        )

    def _sparse_mlp(self, layer: str) -> SparseMlp:
        moe, names = self._spec.moe, expert_names(self._spec)
        assert moe is not None
        router = Router(
            self._linear(f"{layer}{names.block}.gate.weight"),
            moe.experts_per_token,
            normalize=moe.normalize_weights,
        )
        return SparseMlp(router, self._experts(moe, layer, names))

    def _experts(self, moe: MoeSpec, layer: str, names: ExpertNames) -> Experts:
        hidden, inner = self._spec.hidden_size, moe.intermediate_size
        prefixes = [f"{layer}{names.block}.experts.{i}." for i in range(moe.num_experts)]
        num_bytes = 3 * moe.num_experts * hidden * inner * self._dtype.itemsize
        if not StackedExperts.suits(moe.num_experts, moe.experts_per_token, num_bytes):
            return GroupedExperts(
                [
                    Expert(
                        self._linear(f"{p}{names.gate}.weight", f"{p}{names.up}.weight"),
                        self._linear(f"{p}{names.down}.weight"),
                    )
                    for p in prefixes
                ]
            )
        gate_up = [
            self._fused([f"{p}{names.gate}.weight", f"{p}{names.up}.weight"]) for p in prefixes
        ]
        down = [self._copy(f"{p}{names.down}.weight").T for p in prefixes]
        return StackedExperts(torch.stack(gate_up), torch.stack(down))

    def _linear(self, *names: str, bias: list[str] | None = None) -> Linear:
        return prepare_linear(self._fused(list(names)), self._fused(bias) if bias else None)

    def _fused(self, names: list[str]) -> Tensor:
        """Return the tensors one below the other in new memory."""
        parts = [self._checkpoint.tensor(name) for name in names]
        rows = sum(part.shape[0] for part in parts)
        fused = torch.empty(rows, *parts[0].shape[1:], dtype=self._dtype, device=self._device)
        first = 0
        for part in parts:
            fused[first : first + part.shape[0]].copy_(part)
            first += part.shape[0]
        return fused

    def _copy(self, name: str) -> Tensor:
        return self._fused([name])
