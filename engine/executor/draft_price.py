"""What a draft model or head costs beside the model that it drafts for."""

from math import prod

import torch

from engine.models.decoder import Decoder
from engine.models.heads.head import DraftHead
from engine.models.spec import ModelSpec
from engine.models.weights import decoder_tensors
from engine.shared.config import EngineConfig

_BITS = {"int8": 8, "int4": 4, "stored": 4}


def draft_price(
    draft: Decoder | DraftHead | None, served: ModelSpec, dtype: torch.dtype, config: EngineConfig
) -> float:
    """Return what drafting one token costs, as a part of what the model's step of one token does.

    Both read each of their weights once, so the bits of these are compared: an estimate, without
    the little that is computed besides.

    Args:
        draft: what drafts; None if nothing does, which is free.
        served: the model that it drafts for.
        dtype: of weights that `--quantization` leaves alone.
        config: says in how many bits both are.
    """
    if draft is None:
        return 0.0
    num_logits = draft.num_logits if isinstance(draft, DraftHead) else draft.spec.vocab_size
    own = config.model.quantization
    drafting = config.scheduler.speculative_model_quantization or own
    whole = 8 * dtype.itemsize
    bits = _BITS.get(drafting or "", whole) / _BITS.get(own or "", whole)
    return bits * weights_of_token(draft.spec, num_logits) / weights_of_token(served)


def weights_of_token(spec: ModelSpec, num_logits: int | None = None) -> int:
    """Return how many weights a token is multiplied by, in products alone.

    `num_logits`: tokens that get logits, if not all.
    """
    used = 1.0 if spec.moe is None else spec.moe.experts_per_token / spec.moe.num_experts
    in_layers = sum(
        prod(shape) * (used if ".experts." in name else 1)
        for name, shape in decoder_tensors(spec).items()
        if name.startswith("model.layers.") and len(shape) > 1
    )
    return round(in_layers) + spec.hidden_size * (num_logits or spec.vocab_size)
