"""ModernBERT: rotary positions, norms before attention and MLP, mostly local attention."""

import torch

from engine.models.attention.rotary import Rotary, rotary_table
from engine.models.encoders.builder import Builder, Config, activation_of
from engine.models.encoders.encoder import Encoder, EncoderLayer, EncoderLayers
from engine.models.families.config_fields import integer, number
from engine.models.layers import Chain
from engine.models.module import Rows
from engine.models.spec import RopeSpec

PREFIXES = ("model.",)
EMBEDDING = "embeddings.tok_embeddings.weight"
IGNORED = ("head.", "decoder.", "classifier.")


def longest(config: Config) -> int:
    """Return the number of positions."""
    return integer(config, "max_position_embeddings")


def load(config: Config, build: Builder) -> Encoder:
    """Return the encoder of a checkpoint.

    Raises:
        UnsupportedModel: the config requires something that is not implemented.
        CheckpointError: the tensors do not match the config.
    """
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    eps = number(config, "norm_eps", 1e-5)
    bias = bool(config.get("norm_bias"))
    tables = [
        rotary_table(
            RopeSpec(theta=theta), hidden // heads, longest(config), build.dtype, build.device
        )
        for theta in _thetas(config)
    ]
    return Encoder(
        embedding=build.copy(EMBEDDING, integer(config, "vocab_size"), hidden),
        positions=None,
        types=None,
        embedding_norm=build.norm("embeddings.norm", hidden, eps, bias=bias),
        layers=EncoderLayers(
            [_layer(config, build, each) for each in range(integer(config, "num_hidden_layers"))],
            final_norm=build.norm("final_norm", hidden, eps, bias=bias),
        ),
        rotary=[Rotary(table) for table in tables],
    )


def _thetas(config: Config) -> tuple[float, float]:
    """Return the rotary bases of full-attention layers and of local ones."""
    parameters = config.get("rope_parameters") or {}
    global_theta = (parameters.get("full_attention") or {}).get("rope_theta")
    local = (parameters.get("sliding_attention") or {}).get("rope_theta")
    return (
        global_theta or number(config, "global_rope_theta", 160000.0),
        local or number(config, "local_rope_theta", 10000.0),
    )


def _is_global(config: Config, index: int) -> bool:
    kinds = config.get("layer_types")
    if kinds is not None:
        return bool(kinds[index] == "full_attention")
    return index % int(config.get("global_attn_every_n_layers") or 3) == 0


def _layer(config: Config, build: Builder, index: int) -> EncoderLayer:
    hidden, inner = integer(config, "hidden_size"), integer(config, "intermediate_size")
    eps, prefix = number(config, "norm_eps", 1e-5), f"layers.{index}."
    norm_bias = bool(config.get("norm_bias"))
    attention_bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    is_global = _is_global(config, index)
    return EncoderLayer(
        qkv=build.linear(f"{prefix}attn.Wqkv", rows=3 * hidden, width=hidden, bias=attention_bias),
        output=build.linear(f"{prefix}attn.Wo", rows=hidden, width=hidden, bias=attention_bias),
        mlp=build.gated_mlp(
            ((f"{prefix}mlp.Wi",), f"{prefix}mlp.Wo"),
            activation_of(config, "hidden_activation"),
            (hidden, inner),
            bias=mlp_bias,
        ),
        # The embeddings are normalized already.
        attention_norm=build.norm(f"{prefix}attn_norm", hidden, eps, bias=norm_bias)
        if index
        else None,
        mlp_norm=build.norm(f"{prefix}mlp_norm", hidden, eps, bias=norm_bias),
        num_heads=integer(config, "num_attention_heads"),
        norm_first=True,
        rotary=0 if is_global else 1,
        max_distance=None if is_global else int(config.get("local_attention") or 128) // 2,
    )


def head(config: Config, build: Builder, labels: int) -> Rows:
    """Return the classifier, from pooled states to outputs [rows, labels]."""
    hidden, eps = integer(config, "hidden_size"), number(config, "norm_eps", 1e-5)
    norm_bias = bool(config.get("norm_bias"))
    return Chain(
        build.head(
            "head.dense", rows=hidden, width=hidden, bias=bool(config.get("classifier_bias"))
        ),
        activation_of(config, "classifier_activation"),
        build.norm("head.norm", hidden, eps, bias=norm_bias, dtype=torch.float32),
        build.head("classifier", rows=labels, width=hidden),
    )
