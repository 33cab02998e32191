"""Embeddings and scores by vLLM's pooling models."""

from typing import Any

from vllm import PoolingParams as VllmPooling

from engine.shared.messages import PoolingParams
from engine.shared.pooling import PoolingSpec

_KINDS = {"cls": "CLS", "mean": "MEAN", "last": "LAST"}
"""vLLM's names of the ways to pool a sequence."""


def pooling_arguments(spec: PoolingSpec) -> dict[str, Any]:
    """Return vLLM's arguments for a model that pools.

    Raises:
        ValueError: vLLM has no such pooling.
    """
    if spec.pooling not in _KINDS:
        raise ValueError(
            f"--engine-backend vllm: vLLM has no {spec.pooling} pooling; the model needs "
            "--engine-backend swell"
        )
    pooler: dict[str, Any] = {"seq_pooling_type": _KINDS[spec.pooling]}
    if spec.tokens is not None and spec.tokens.step_tag_id is not None:
        pooler |= {"tok_pooling_type": "STEP", "step_tag_id": spec.tokens.step_tag_id}
    if spec.logits is not None:
        pooler |= {"logit_mean": spec.logits.mean, "logit_sigma": spec.logits.sigma}
    arguments: dict[str, Any] = {"runner": "pooling", "pooler_config": pooler}
    if spec.dimensions is not None:  # vLLM reads them from config.json only
        sizes = {"matryoshka_dimensions": list(spec.dimensions)} if spec.dimensions else {}
        arguments["hf_overrides"] = {"is_matryoshka": True, **sizes}
    return arguments


def pooling_params(params: PoolingParams, spec: PoolingSpec) -> VllmPooling:
    """Return vLLM's parameters of a request."""
    is_converted = spec.normalize if spec.task == "embed" else spec.activation != "identity"
    types = {"compressed_token_type_ids": params.types_from} if params.types_from else None
    return VllmPooling(
        task=f"token_{spec.task}" if params.per_token else spec.task,
        use_activation=params.activate and is_converted,
        dimensions=params.dimensions or None,
        extra_kwargs=types,
    )
