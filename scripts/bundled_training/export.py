"""Writes the model directory from the best weights of a run."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .card import model_card
from .chat_format import CHAT_TEMPLATE, END_OF_TEXT, SPECIAL_TOKENS, TURN_END, TURN_START
from .evaluation import evaluate
from .model import hub_tensors
from .shape import Shape
from .trainer import Trainer


def tokenizer_config(shape: Shape) -> dict[str, Any]:
    """Return the content of tokenizer_config.json."""
    special = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {
            str(index): {"content": token, **special, "special": True}
            for index, token in enumerate(SPECIAL_TOKENS)
        },
        "additional_special_tokens": [TURN_START],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "model_max_length": shape.max_position_embeddings,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
    }


def generation_config() -> dict[str, Any]:
    """Return the content of generation_config.json."""
    return {
        "do_sample": True,
        "eos_token_id": [SPECIAL_TOKENS.index(TURN_END), SPECIAL_TOKENS.index(END_OF_TEXT)],
        "pad_token_id": SPECIAL_TOKENS.index(END_OF_TEXT),
        "temperature": 0.7,
        "top_p": 0.95,
    }


def export(trainer: Trainer) -> None:
    """Write the model directory from the best weights."""
    state = torch.load(trainer.work / "best.pt", weights_only=True)
    # What is measured and sampled for the card is what is shipped: the rounded weights.
    trainer.model.load_state_dict(
        {name: value.bfloat16().float() for name, value in state["model"].items()}
    )
    trainer.model.eval()
    output: Path = trainer.options.output
    output.mkdir(parents=True, exist_ok=True)
    result = evaluate(trainer.model, trainer.tokenizer, trainer.held_out_text)
    partial = output / "model.safetensors.partial"
    save_file(hub_tensors(trainer.model), partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors makes files that only their owner can read
    os.replace(partial, output / "model.safetensors")
    for name, content in (
        ("config.json", trainer.shape.config()),
        ("generation_config.json", generation_config()),
        ("tokenizer_config.json", tokenizer_config(trainer.shape)),
    ):
        text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        (output / name).write_text(text, encoding="utf-8")
    shutil.copyfile(trainer.work / "tokenizer.json", output / "tokenizer.json")
    card = model_card(trainer, result, state["step"])
    (output / "README.md").write_text(card, encoding="utf-8")
    trainer.console.print(
        f"wrote {output}: step {state['step']}, held out {result.nats_per_token:.4f} nats/token, "
        f"{result.bits_per_byte:.4f} bits/byte",
        highlight=False,
    )
