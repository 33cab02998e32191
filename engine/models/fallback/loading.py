"""Loads a transformers model that attends over the paged KV cache."""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.models.attention.choice import attention_of
from engine.models.attention.kv_format import KvCacheDtype
from engine.models.cache_groups import CacheGroups, one_group
from engine.models.fallback.attention import (
    INTERFACE,
    AttentionCalls,
    CannotAttend,
    LayerCall,
    register,
)
from engine.models.fallback.decoder import FallbackDecoder, TransformersModel
from engine.models.fallback.served import check_class, refusal, transformers_class
from engine.models.fallback.trial import check_parts, narrow_windows, trial_tokens
from engine.models.formats.files import (
    CheckpointError,
    TensorFiles,
    abbreviated,
    weights_fingerprint,
)
from engine.models.formats.pretrained import read_pretrained
from engine.models.hf_config import read_config, read_generation
from engine.models.settings import ComputeTypes
from engine.models.spec import ModelSpec, NormSpec
from engine.shared.config import ModelConfig
from engine.shared.end_tokens import end_token_ids

logger = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class LoadedFallback(msgspec.Struct, frozen=True):
    """A model and the digest of its weights."""

    model: FallbackDecoder
    fingerprint: str


def load_fallback(
    directory: Path,
    settings: ModelConfig,
    device: torch.device,
    groups: Callable[[ModelSpec], CacheGroups] | None = None,
    kv_cache_dtype: KvCacheDtype = "auto",
) -> LoadedFallback:
    """Load a model with transformers, test it, and connect it to the paged KV cache.

    Args:
        directory: contains the checkpoint.
        settings: settings of the model.
        device: device the model runs on.
        groups: assigns layers to cache groups; default: one group.
        kv_cache_dtype: storage format of the KV cache.

    Raises:
        UnsupportedModel: transformers is not installed or has no class that can be served.
        CheckpointError: the weights do not match the config.
    """
    raw = read_config(directory)
    model_class = transformers_class(raw)
    name = model_class.__name__
    import transformers

    quiet: Any = transformers.logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # configuration classes raise arbitrary exceptions
        raise refusal(name, f"config.json cannot be read: {error}") from error
    check_class(model_class, config)
    register()
    loaded = _read(directory, model_class, config, settings).to(device).eval()
    if loaded.dtype not in _DTYPES.values():
        raise refusal(name, f"its weights are {loaded.dtype}: use --dtype")
    ends = end_token_ids(directory, raw, read_generation(directory))
    try:
        with torch.inference_mode():
            decoder = _try(loaded, raw, ends, config, device, kv_cache_dtype)
    except (CannotAttend, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise refusal(name, str(error)) from error
    if groups is not None:
        decoder = decoder.grouped(groups(decoder.spec))
    is_requested = settings.model_impl == "transformers"
    logger.info(
        "%s is computed by transformers %s (%s): %d attention layers over the paged KV cache",
        name,
        transformers.__version__,
        "--model-impl transformers" if is_requested else "no built-in family",
        decoder.spec.num_layers,
    )
    return LoadedFallback(decoder, _fingerprint(directory, settings))


def _try(
    loaded: Any,
    raw: dict[str, Any],
    ends: tuple[int, ...],
    config: Any,
    device: torch.device,
    kv_cache_dtype: KvCacheDtype,
) -> FallbackDecoder:
    """Record how a model attends, and check that the paged KV cache gives the same results.

    Raises:
        CannotAttend: the results differ, or the model is unsupported; its exceptions propagate.
    """
    calls, model = AttentionCalls(loaded), TransformersModel(loaded)
    if not model.takes_positions:
        raise CannotAttend("it does not accept the positions of tokens")
    tokens = trial_tokens(loaded.get_input_embeddings().num_embeddings, device)

    def decoder(types: ComputeTypes) -> FallbackDecoder:
        calls.begin_trial()
        states = model.states(tokens, None)
        calls.end_trial()
        vocabulary = model.logits(states[-1:]).shape[1]
        spec = _spec(raw, ends, config, calls.layers, vocabulary)
        attention = attention_of(spec, types.kv_format, device)
        calls.serve(attention, types.kv_format, width=spec.head_dim, scale=calls.layers[0].scale)
        return FallbackDecoder(spec, model, calls, attention, types, device)

    exact = ComputeTypes(loaded.dtype, loaded.dtype)
    with narrow_windows(loaded):
        check_parts(decoder(exact), model, loaded, tokens)
    # Checked with exact types: rounding would hide real differences.
    return decoder(exact._replace(kv_cache_dtype=kv_cache_dtype))


def _read(directory: Path, model_class: Any, config: Any, settings: ModelConfig) -> Any:
    """Return the transformers model with its weights, on the CPU.

    Raises:
        CheckpointError: files or tensors are missing, or have wrong shapes.
    """
    dtype = None if settings.dtype == "auto" else _DTYPES[settings.dtype]
    model, found = read_pretrained(
        directory, model_class, config, settings, dtype, attn_implementation=INTERFACE
    )
    problems = [
        f"{kind} {name}"
        for kind in ("missing", "mismatched")
        for name in sorted(str(each) for each in found.get(f"{kind}_keys", ()))
    ]
    if problems:
        raise CheckpointError(
            f"the weights in {directory} do not fit the model's config: {abbreviated(problems)}"
        )
    return model


def _spec(
    raw: dict[str, Any],
    ends: tuple[int, ...],
    config: Any,
    layers: list[LayerCall],
    vocabulary: int,
) -> ModelSpec:
    """Return the description of the model used by everything but its layers."""
    text, first = config.get_text_config(), layers[0]
    shapes = {(each.heads, each.kv_heads) for each in layers}
    if len(shapes) > 1:
        raise CannotAttend("its layers have different numbers of heads")
    if len({each.softcap for each in layers}) > 1:
        raise CannotAttend("its layers cap scores differently")
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int):
        raise CannotAttend("config.json has no max_position_embeddings")
    return ModelSpec(
        architecture=str(raw["architectures"][0]),
        vocab_size=min(vocabulary, text.vocab_size),
        hidden_size=text.hidden_size,
        intermediate_size=0,
        num_layers=len(layers),
        num_heads=first.heads,
        num_kv_heads=first.kv_heads,
        head_dim=max(each.width for each in layers),
        norm=NormSpec(eps=0.0),
        ropes=(None,) * len(layers),
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        windows=tuple(each.window for each in layers),
        cache_groups=one_group([each.window for each in layers]),
        attention_scale=first.scale,
        attention_softcap=first.softcap,
        attention_sinks=any(each.has_sinks for each in layers),
        eos_token_ids=tuple([each for each in ends if each < vocabulary]),
    )


def _fingerprint(directory: Path, settings: ModelConfig) -> str:
    """Return a digest that is equal for equal weights."""
    config = (directory / "config.json").read_bytes() + b" transformers"
    if settings.load_format == "dummy":
        return hashlib.sha256(config + f" dummy {settings.seed}".encode()).hexdigest()[:32]
    files = TensorFiles(directory)
    described = {name: f"{list(shape)} {files.types[name]}" for name, shape in files.shapes.items()}
    return weights_fingerprint(config, described, files.tensor)
