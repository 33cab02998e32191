"""Random adapters written by PEFT, and the merged model as the reference."""

import copy
import functools
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.engine.tiny_models import Checkpoint

TEXT_OF_SEEING_MODELS = r".*(text_model|language_model).*\.(q_proj|o_proj|down_proj)"
"""Modules of a text model beside which there is a vision encoder."""


class Trained:
    """An adapter's directory, and the merged model."""

    def __init__(self, directory: Path, merged: Checkpoint) -> None:
        self.directory = directory
        self.merged = merged


def train(base: Checkpoint, directory: Path, seed: int, **config: Any) -> Trained:
    """Write a random adapter of a model."""
    import peft  # slow, so import it only to create adapters

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


def exact(base: Checkpoint, adapter: Path | None = None) -> Checkpoint:
    """Return a Llama, or what it is with an adapter merged, computed in float64.

    But for the angles of positions, which transformers computes in float32 in any case.
    """
    import peft

    model: Any = copy.deepcopy(base.reference).double()
    if adapter is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted: Any = peft.PeftModel.from_pretrained(
                model, str(adapter), torch_dtype="float64"
            )
        model = adapted.double().merge_and_unload()
    for module in model.modules():
        if type(module) is LlamaRMSNorm:  # it computes in float32 whatever it is given
            norm: Any = module
            norm.forward = functools.partial(_norm, norm)
    return Checkpoint(base.directory, model.eval())


def _norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    scale: torch.Tensor = (x.square().mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()
    weight: torch.Tensor = module.weight
    return weight * x * scale
