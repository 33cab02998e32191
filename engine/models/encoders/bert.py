"""BERT, RoBERTa and XLM-RoBERTa: embedded positions, norms after attention and MLP."""

import torch

from engine.models.encoders.builder import Builder, Config, activation_of
from engine.models.encoders.encoder import Encoder, EncoderLayer, EncoderLayers
from engine.models.families.config_fields import integer, number
from engine.models.layers import Chain
from engine.models.module import Rows
from engine.models.spec import UnsupportedModel

PREFIXES = ("bert.", "roberta.")
EMBEDDING = "embeddings.word_embeddings.weight"
IGNORED = ("embeddings.position_ids", "cls.", "lm_head.", "pooler.")


def is_roberta(config: Config) -> bool:
    """Return whether positions start after the padding token's."""
    return str(config["architectures"][0]).startswith(("Roberta", "XLMRoberta"))


def longest(config: Config) -> int:
    """Return the number of positions."""
    positions = integer(config, "max_position_embeddings")
    return positions - _first_position(config)


def _first_position(config: Config) -> int:
    return int(config.get("pad_token_id") or 0) + 1 if is_roberta(config) else 0


def load(config: Config, build: Builder) -> Encoder:
    """Return the encoder of a checkpoint.

    Raises:
        UnsupportedModel: the config requires something that is not implemented.
        CheckpointError: the tensors do not match the config.
    """
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise UnsupportedModel("config.json: position_embedding_type must be absolute")
    if config.get("is_decoder"):
        raise UnsupportedModel("config.json: is_decoder is not supported for encoders")
    hidden = integer(config, "hidden_size")
    eps = number(config, "layer_norm_eps", 1e-12)
    types = int(config.get("type_vocab_size", 2))
    positions = build.copy(
        "embeddings.position_embeddings.weight",
        integer(config, "max_position_embeddings"),
        hidden,
    )
    return Encoder(
        embedding=build.copy(EMBEDDING, integer(config, "vocab_size"), hidden),
        positions=positions[_first_position(config) :],
        types=build.copy("embeddings.token_type_embeddings.weight", types, hidden),
        embedding_norm=build.norm("embeddings.LayerNorm", hidden, eps),
        layers=EncoderLayers(
            [
                _layer(config, build, f"encoder.layer.{index}.")
                for index in range(integer(config, "num_hidden_layers"))
            ],
            final_norm=None,
        ),
    )


def _layer(config: Config, build: Builder, prefix: str) -> EncoderLayer:
    hidden, inner = integer(config, "hidden_size"), integer(config, "intermediate_size")
    eps = number(config, "layer_norm_eps", 1e-12)
    attention = f"{prefix}attention."
    return EncoderLayer(
        qkv=build.linear(
            *(f"{attention}self.{name}" for name in ("query", "key", "value")),
            rows=hidden,
            width=hidden,
        ),
        output=build.linear(f"{attention}output.dense", rows=hidden, width=hidden),
        mlp=build.mlp(
            (f"{prefix}intermediate.dense", f"{prefix}output.dense"),
            activation_of(config, "hidden_act"),
            (hidden, inner),
        ),
        attention_norm=build.norm(f"{attention}output.LayerNorm", hidden, eps),
        mlp_norm=build.norm(f"{prefix}output.LayerNorm", hidden, eps),
        num_heads=integer(config, "num_attention_heads"),
        norm_first=False,
    )


def head(config: Config, build: Builder, labels: int) -> Rows:
    """Return the classifier, from first tokens' states to outputs [rows, labels]."""
    hidden = integer(config, "hidden_size")
    first, second = ("pooler.dense", "classifier")
    if is_roberta(config):
        first, second = "classifier.dense", "classifier.out_proj"
    return Chain(
        build.head(first, rows=hidden, width=hidden),
        torch.tanh,
        build.head(second, rows=labels, width=hidden),
    )
