"""Writes model directories for benchmarks: random weights and a tokenizer of 32,000 tokens.

python -m benchmarks.make_model 0.4b /tmp/models/0.4b
python -m benchmarks.make_model 2-layer /tmp/models/2-layer

Any server that reads Hugging Face directories can load them. The tokenizer is a byte-level BPE
trained on made-up words, so that random token ids decode to text that encodes to about as many
tokens again. Everything is determined by the seed.
"""

import argparse
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 32_000
HEAD_DIM = 64
_WORDS = 40_000
_SENTENCES = 40_000
_WORDS_PER_SENTENCE = 12
_END = "<|end|>"
_START = "<|start|>"


class Shape(NamedTuple):
    """Sizes of a Llama model with tied embeddings and head dimension 64."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int


SHAPES = {
    "0.4b": Shape(hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2),
    "2-layer": Shape(hidden=128, intermediate=256, layers=2, heads=2, kv_heads=1),
}


def write_model(directory: Path, shape: Shape, seed: int = 0) -> None:
    """Write config, weights (bfloat16) and tokenizer into a new or existing directory."""
    write_config(directory, shape)
    write_tokenizer(directory, seed)
    weights = dict(_weights(shape, torch.Generator().manual_seed(seed)))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def write_config(directory: Path, shape: Shape) -> None:
    """Write only config.json, which suffices for dummy weights."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _weights(shape: Shape, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    def drawn(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=torch.bfloat16).normal_(
            std=0.02, generator=generator
        )

    def ones() -> torch.Tensor:
        return torch.ones(shape.hidden, dtype=torch.bfloat16)

    queries, keys = shape.heads * HEAD_DIM, shape.kv_heads * HEAD_DIM
    yield "model.embed_tokens.weight", drawn(VOCAB_SIZE, shape.hidden)
    yield "model.norm.weight", ones()
    for index in range(shape.layers):
        layer = f"model.layers.{index}."
        yield layer + "input_layernorm.weight", ones()
        yield layer + "post_attention_layernorm.weight", ones()
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{layer}self_attn.{name}_proj.weight", drawn(rows, shape.hidden)
        yield layer + "self_attn.o_proj.weight", drawn(shape.hidden, queries)
        for name in ("gate", "up"):
            yield f"{layer}mlp.{name}_proj.weight", drawn(shape.intermediate, shape.hidden)
        yield layer + "mlp.down_proj.weight", drawn(shape.hidden, shape.intermediate)


def write_tokenizer(directory: Path, seed: int) -> None:
    """Train the tokenizer and write its two files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[_START, _END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_text(random.Random(seed)), trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the tokenizer got {tokenizer.get_vocab_size()} tokens")
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _START,
        "eos_token": _END,
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _text(draw: random.Random) -> Iterator[str]:
    """Yield sentences of made-up words with a skewed frequency distribution."""
    onsets = [*"bcdfghklmnprstvw", "br", "dr", "gr", "kl", "pl", "sk", "st", "tr", "th", "sh"]
    nuclei = [*"aeiou", "ai", "ea", "ou"]
    syllables = [onset + nucleus for onset, nucleus in itertools.product(onsets, nuclei)]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(_WORDS)]
    frequencies = [1.0 / (rank + 20) for rank in range(len(words))]
    cumulative = list(itertools.accumulate(frequencies))
    for _ in range(_SENTENCES):
        chosen = draw.choices(words, cum_weights=cumulative, k=_WORDS_PER_SENTENCE)
        yield " ".join(chosen) + "."


def main() -> None:
    """Write the directory given on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    write_model(options.directory, SHAPES[options.shape], options.seed)
    print(f"{options.directory} holds a model of shape {options.shape}")


if __name__ == "__main__":
    main()
