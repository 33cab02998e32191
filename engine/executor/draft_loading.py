"""Loads the draft model or draft head."""

from collections.abc import Callable
from math import prod
from typing import Any

import msgspec
import torch

from engine.executor.loading import draft_settings, load_model
from engine.executor.rules import BadDraftModel, check_draft_model, check_head_settings
from engine.models.decoder import Decoder
from engine.models.fallback.decoder import FallbackDecoder
from engine.models.heads.eagle3 import is_eagle3, is_unsupported_head, load_eagle3
from engine.models.heads.head import DraftHead
from engine.models.heads.mtp import load_mtp
from engine.models.hf_config import read_config
from engine.models.settings import ComputeTypes
from engine.models.spec import ModelSpec
from engine.models.weights import decoder_tensors
from engine.shared.config import EngineConfig, LoraConfig, ModelConfig, ParallelConfig
from engine.shared.model_files import model_directory

_BITS = {"int8": 8, "int4": 4, "stored": 4}


def draft_price(
    draft: Decoder | DraftHead | None, served: ModelSpec, dtype: torch.dtype, config: EngineConfig
) -> float:
    """Return the cost of drafting one token, relative to the model's step of one token.

    Both read each of their weights once, so the weights' total bits are compared: an estimate that
    ignores the little other computation.

    Args:
        draft: the draft model or head; None costs nothing.
        served: spec of the served model.
        dtype: dtype of unquantized weights.
        config: determines the bits per weight of both.
    """
    if draft is None:
        return 0.0
    num_logits = draft.num_logits if isinstance(draft, DraftHead) else draft.spec.vocab_size
    target_quantization = config.model.quantization
    drafting = config.scheduler.speculative_model_quantization or target_quantization
    whole = 8 * dtype.itemsize
    bits = _BITS.get(drafting or "", whole) / _BITS.get(target_quantization or "", whole)
    return bits * weights_of_token(draft.spec, num_logits) / weights_of_token(served)


def weights_of_token(spec: ModelSpec, num_logits: int | None = None) -> int:
    """Return the number of weights that a token is multiplied by in matrix products.

    `num_logits`: number of logits per token, if not the vocabulary size.
    """
    used = 1.0 if spec.moe is None else spec.moe.experts_per_token / spec.moe.num_experts
    in_layers = sum(
        prod(shape) * (used if ".experts." in name else 1)
        for name, shape in decoder_tensors(spec).items()
        if name.startswith("model.layers.") and len(shape) > 1
    )
    return round(in_layers) + spec.hidden_size * (num_logits or spec.vocab_size)


def load_draft(
    config: EngineConfig,
    target: Decoder,
    max_model_len: int,
    report: Callable[[str], None],
) -> Decoder | DraftHead | None:
    """Load the configured draft model or head; None if there is none.

    It is never sharded, even if the served model is: its steps are so small that sharding costs
    more than it saves.

    Args:
        config: all settings; dtypes and weight settings of the served model apply to both.
        target: the served model.
        max_model_len: maximum sequence length, which a draft model must support too.
        report: receives human-readable progress messages.

    Raises:
        BadDraftModel: its vocabulary or positions do not match the served model, or the settings do
            not support it.
        ModelNotFound: there is no such model.
        UnsupportedModel: its config requires an unimplemented feature.
        CheckpointError: the weights do not fit the config.
    """
    is_mtp = config.scheduler.speculative_method == "mtp"
    name = config.scheduler.speculative_model
    if name is None and not is_mtp:
        return None
    settings = msgspec.structs.replace(draft_settings(config), max_model_len=max_model_len)
    described = read_config(model_directory(settings, weights=False))
    if is_mtp or is_eagle3(described):
        return _load_head(config, settings, described, target, report)
    if is_unsupported_head(described):
        named = ", ".join(described.get("architectures") or []) or "a speculator"
        raise BadDraftModel(
            f"--speculative-model {name}: {named} is not supported; of draft heads EAGLE-3 is"
        )
    check_draft_model(settings, config.model, target.spec, max_model_len)
    draft_config = msgspec.structs.replace(
        config,
        model=settings,
        lora=LoraConfig(),
        parallel=ParallelConfig(),
        executor=msgspec.structs.replace(config.executor, batch_invariant=False),
    )
    return load_model(draft_config, target.device, report, served=target.spec.cache_groups).model


def _load_head(
    config: EngineConfig,
    settings: ModelConfig,
    described: dict[str, Any],
    target: Decoder,
    report: Callable[[str], None],
) -> DraftHead:
    check_head_settings(config, is_fallback=isinstance(target, FallbackDecoder))
    directory = model_directory(settings, weights=True)
    assert settings.max_model_len is not None
    # The dtypes of the served model.
    types = ComputeTypes(target.dtype, target.kv_format.dtype, config.cache.kv_cache_dtype)
    with torch.inference_mode():
        if config.scheduler.speculative_method == "mtp":
            report(f"loading the layer for multi-token prediction of {directory.name}")
            described = described | (described.get("text_config") or {})
            return load_mtp(
                directory,
                described.get("num_nextn_predict_layers"),
                target,
                types=types,
                max_model_len=settings.max_model_len,
                quantization=settings.quantization,
            )
        report(f"loading the draft head {directory.name}")
        return load_eagle3(
            directory,
            described,
            target,
            types=types,
            max_model_len=settings.max_model_len,
            quantization=settings.quantization,
        )
