"""Random adapters as PEFT writes them, and the merged model as the reference."""

import copy
import warnings
from pathlib import Path
from typing import Any

import peft
import torch

from tests.engine.tiny_models import Checkpoint


class Trained:
    """An adapter's directory, and the model that it is merged into."""

    def __init__(self, directory: Path, merged: Checkpoint) -> None:
        self.directory = directory
        self.merged = merged


def train(base: Checkpoint, directory: Path, seed: int, **config: Any) -> Trained:
    """Write a random adapter of a model."""
    config = dict[str, Any](r=4, lora_alpha=8, target_modules="all-linear") | config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what PEFT asks transformers
        model: Any = peft.get_peft_model(copy.deepcopy(base.reference), peft.LoraConfig(**config))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            noise = torch.randn(parameter.shape, generator=generator)
            with torch.no_grad():
                parameter.copy_(0.1 * noise)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(directory)
    if not {"embed_tokens", "lm_head"} & set(config["target_modules"]):  # which may be one tensor
        model = model.merge_and_unload()
    return Trained(directory, Checkpoint(directory, model.eval()))
