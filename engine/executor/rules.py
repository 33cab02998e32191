"""Checks for settings that conflict with each other, with a model, or with its draft model."""

import json
from pathlib import Path

from engine.models.hf_config import read_spec
from engine.models.spec import ModelSpec, UnsupportedModel, VisionSpec
from engine.shared.config import EngineConfig, ModelConfig
from engine.shared.gguf.directory import is_gguf
from engine.shared.model_files import model_directory
from engine.shared.pooling import BadPooling, PoolingSpec


class BadDraftModel(ValueError):
    """The draft model does not match the served model, or the settings."""


def check_draft_settings(config: EngineConfig) -> None:
    """Reject settings that do not support a draft model.

    Raises:
        BadDraftModel: naming the setting to change.
    """
    if config.scheduler.drafts_with_model and config.executor.executor == "simulated":
        raise BadDraftModel(
            f"{_draft_setting(config)}: leave out --executor simulated, which computes no model"
        )


def _applicable(refused: dict[str, bool]) -> str:
    return "; ".join(reason for reason, applies in refused.items() if applies)


def _draft_setting(config: EngineConfig) -> str:
    is_mtp = config.scheduler.speculative_method == "mtp"
    return "--speculative-method mtp" if is_mtp else "--speculative-model"


def check_head_settings(config: EngineConfig, *, is_fallback: bool) -> None:
    """Reject settings that do not support a draft head, in addition to those for draft models.

    Args:
        config: all settings.
        is_fallback: whether the library transformers computes the model.

    Raises:
        BadDraftModel: naming the setting to change.
    """
    is_mtp = config.scheduler.speculative_method == "mtp"
    refused = {
        "leave out --load-format dummy, which has no weights for a head": (
            config.model.load_format == "dummy"
        ),
        "--model is a GGUF file, which has no such layer": is_mtp and is_gguf(config.model.model),
        "--model-impl transformers gives no states between layers": is_fallback,
        "leave --pipeline-parallel-size at 1: the last stage, which drafts, has neither states of "
        "earlier layers nor the embedding": config.parallel.pipeline_parallel_size > 1,
    }
    if reasons := _applicable(refused):
        raise BadDraftModel(f"{_draft_setting(config)} with a draft head: {reasons}")


def check_draft_model(
    draft: ModelConfig, served: ModelConfig, target: ModelSpec, max_model_len: int
) -> None:
    """Reject a draft model whose vocabulary differs from the served model's.

    Args:
        draft: settings of the draft model.
        served: settings of the served model.
        target: spec of the served model.
        max_model_len: maximum sequence length of both.

    Raises:
        BadDraftModel: stating how they differ.
        ModelNotFound: there is no such draft model.
        UnsupportedModel: its config requires an unimplemented feature.
    """
    directory = model_directory(draft, weights=False)
    spec = read_spec(directory)
    what = f"--speculative-model {draft.model}"
    if spec.vocab_size != target.vocab_size:
        raise BadDraftModel(
            f"{what}: it has a vocabulary of {spec.vocab_size} tokens, the model that is served "
            f"has one of {target.vocab_size}: both need the same tokenizer"
        )
    if spec.max_position_embeddings < max_model_len:
        raise BadDraftModel(
            f"{what}: it was made for {spec.max_position_embeddings} positions: set "
            f"--max-model-len to that or less, which is {max_model_len} now"
        )
    draft_tokens, served_tokens = (
        _tokens(directory),
        _tokens(model_directory(served, weights=False)),
    )
    if draft_tokens is not None and served_tokens is not None and draft_tokens != served_tokens:
        different = min(
            index for index, _ in set(draft_tokens.items()) ^ set(served_tokens.items())
        )
        raise BadDraftModel(
            f"{what}: token {different} is {draft_tokens.get(different)!r} in its tokenizer, and "
            f"{served_tokens.get(different)!r} in that of the model that is served: both need the "
            "same"
        )


def _tokens(directory: Path) -> dict[int, str] | None:
    """Return the text of each token in the tokenizer's file; None if there is no such file."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    content = json.loads(path.read_bytes())
    vocabulary = content.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, dict):
        tokens = {int(index): str(text) for text, index in vocabulary.items()}
    else:  # in order, each with its score
        tokens = {index: str(each[0]) for index, each in enumerate(vocabulary)}
    added = content.get("added_tokens") or []
    return tokens | {int(each["id"]): str(each["content"]) for each in added}


def check_pooling(config: EngineConfig, pooling: PoolingSpec) -> None:
    """Reject settings that do not support pooling models.

    Raises:
        BadPooling: naming the setting to change.
    """
    parallel = config.parallel
    refused = {
        "--speculative-ngram proposes tokens, and this model generates none": (
            config.scheduler.speculative_ngram > 0
        ),
        "--speculative-model proposes tokens, and this model generates none": (
            config.scheduler.speculative_model is not None
        ),
        "--speculative-method proposes tokens, and this model generates none": (
            config.scheduler.speculative_method != "auto"
        ),
        "--enable-expert-parallel is for models that generate": parallel.enable_expert_parallel,
        "--pipeline-parallel-size is for models that generate: leave it at 1": (
            parallel.pipeline_parallel_size > 1
        ),
        "--model-impl transformers is for models that generate": (
            config.model.model_impl == "transformers"
        ),
        "--enable-lora is for models that generate": config.lora.enable_lora,
    }
    if pooling.is_encoder:
        refused |= {
            "an encoder is computed by one process: leave --tensor-parallel-size and "
            "--pipeline-parallel-size at 1": parallel.processes > 1,
            "an encoder keeps no keys and values: leave out --kv-cache-dtype": (
                config.cache.kv_cache_dtype != "auto"
            ),
            "an encoder is computed with the weights as stored: leave out --quantization": (
                config.model.quantization is not None
            ),
        }
    if reasons := _applicable(refused):
        raise BadPooling(f"this is a pooling model (--runner pooling): {reasons}")


def check_sharded_state(config: EngineConfig, *, is_fallback: bool, is_pooling: bool) -> None:
    """Reject settings that do not support pre-sharded weights.

    Raises:
        UnsupportedModel: naming the setting to change.
    """
    refused = {
        "leave out --enable-expert-parallel, which spreads experts anew": (
            config.parallel.enable_expert_parallel
        ),
        "leave out the draft model or head": config.scheduler.drafts_with_model,
        "leave out --model-impl transformers": is_fallback,
        "--runner pooling has its weights read whole": is_pooling,
        "a GGUF file is read whole": is_gguf(config.model.model),
    }
    if config.model.load_format == "sharded_state" and (reasons := _applicable(refused)):
        raise UnsupportedModel(f"--load-format sharded_state: {reasons}")


def image_refusal(config: EngineConfig, vision: VisionSpec) -> str | None:
    """Return why images are refused; None if they are accepted."""
    if not vision.is_bidirectional:
        return None
    scheduling = config.scheduler
    step = scheduling.max_num_batched_tokens
    longest = scheduling.long_prefill_token_threshold or step
    needed = vision.max_tokens
    problems = {
        f"--max-num-batched-tokens {step} is less than --max-num-seqs {scheduling.max_num_seqs} "
        f"and an image, whose {needed} tokens are computed in one step": (
            step < scheduling.max_num_seqs + needed
        ),
        f"--long-prefill-token-threshold {longest} is less than the {needed} tokens of an image, "
        "which are computed in one step": longest < needed,
    }
    return next((problem for problem, is_there in problems.items() if is_there), None)
