"""What a draft model or head costs beside the model that it drafts for."""

import torch

from engine.models.decoder import Decoder
from engine.models.heads.head import DraftHead
from engine.models.spec import ModelSpec
from engine.shared.config import EngineConfig

_BITS = {"int8": 8, "int4": 4}


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
    attention = 2 * spec.hidden_size * (spec.query_size + spec.kv_size)
    latent = spec.latent
    if latent is not None:
        attention = _latent_weights(spec)
    mlps = sum(_mlp_width(spec, layer) for layer in range(spec.num_layers))
    return (
        spec.num_layers * attention
        + 3 * spec.hidden_size * mlps
        + spec.hidden_size * (num_logits or spec.vocab_size)
    )


def _mlp_width(spec: ModelSpec, layer: int) -> int:
    """Return the inner width of all MLPs that a token goes through in a layer."""
    moe = spec.moe
    if moe is None or not moe.layers[layer]:
        return spec.intermediate_size
    return moe.experts_per_token * moe.intermediate_size + moe.shared_size


def _latent_weights(spec: ModelSpec) -> int:
    """Return the weights of one layer's multi-head latent attention."""
    latent = spec.latent
    assert latent is not None
    query_size = spec.num_heads * (latent.plain_size + latent.rotated_size)
    queries = spec.hidden_size * query_size
    if latent.query_rank is not None:
        queries = latent.query_rank * (spec.hidden_size + query_size)
    keys = spec.hidden_size * (latent.rank + latent.rotated_size)
    values = latent.rank * spec.num_heads * (latent.plain_size + latent.value_size)
    return queries + keys + values + spec.num_heads * latent.value_size * spec.hidden_size
