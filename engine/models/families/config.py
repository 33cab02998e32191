"""A decoded config.json over its class's defaults, which records the keys that are read."""

import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

from engine.models.spec import UnsupportedModel

logger = logging.getLogger(__name__)

HARMLESS = frozenset(
    (
        # provenance of the file
        "_name_or_path", "architectures", "auto_map", "dtype", "model_type", "torch_dtype",
        "transformers_version", "quantization_config", "unsloth_fixed", "unsloth_version",
        "_attn_implementation", "_attn_implementation_autoset", "_experts_implementation",
        # read elsewhere, or irrelevant for generation
        "bos_token_id", "eos_token_id", "pad_token_id", "is_encoder_decoder", "is_decoder",
        "id2label", "label2id", "problem_type", "num_labels", "classifier_dropout",
        "return_dict", "output_attentions", "output_hidden_states", "use_return_dict",
        "generation_config", "tokenizer_class", "cache_implementation", "use_cache",
        "chunk_size_feed_forward", "task_specific_params", "prefix", "finetuning_task",
        "add_cross_attention", "cross_attention_hidden_size", "decoder_start_token_id",
        "pruned_heads", "sep_token_id", "tf_legacy_loss", "tie_encoder_decoder", "torchscript",
        "use_bfloat16", "model_max_length", "compression_config", "use_flash_attention",
        # sampling defaults, now in generation_config.json
        "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample",
        "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty",
        "forced_bos_token_id", "forced_eos_token_id", "length_penalty", "max_length",
        "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
        "num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty",
        "return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p",
        "typical_p",
        # training
        "initializer_range", "attention_dropout", "embd_pdrop", "resid_pdrop", "hidden_dropout",
        "aux_loss_alpha", "seq_aux", "output_router_logits", "router_aux_loss_coef",
        "router_jitter_noise", "pretraining_tp", "ep_size", "gradient_checkpointing",
        # number of draft layers
        "num_mtp_layers", "num_nextn_predict_layers",
    )
)  # fmt: skip
"""Keys that do not affect the model's computation."""


class Config(dict[str, Any]):
    """The keys of a config.json, or their defaults."""

    def __init__(self, values: dict[str, Any], read: set[str] | None = None) -> None:
        """Initialize from the values; `read` collects the keys that are read."""
        super().__init__(values)
        self.read_keys: set[str] = set() if read is None else read

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, and record its key as read."""
        self.read_keys.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        """Return an existing value, and record its key as read."""
        self.read_keys.add(key)
        return super().__getitem__(key)

    def replaced(self, **changes: Any) -> "Config":
        """Return a config with changed values that shares the record of read keys."""
        return Config({**self, **changes}, self.read_keys)


def with_defaults(architecture: str, stored: dict[str, Any]) -> Config:
    """Return a config with aliases resolved, over the defaults of the class."""
    known = _known(architecture, stored)
    aliases = known["aliases"]
    return Config(known["keys"] | {aliases.get(key, key): value for key, value in stored.items()})


def check_unread(
    architecture: str, stored: dict[str, Any], config: Config, ignored: tuple[str, ...]
) -> None:
    """Warn about keys that nothing has read.

    Args:
        stored: the part of config.json that describes the text model.
        config: the same, after the family has read its keys.
        ignored: keys that the class of transformers does not read either.

    Raises:
        UnsupportedModel: such a key changes what the model computes.
    """
    known, unknown = _known(architecture, stored), []
    for name in stored:
        key = known["aliases"].get(name, name)
        if key in config.read_keys or key in HARMLESS or key in ignored:
            continue
        if key not in known["keys"]:
            unknown.append(name)
            continue
        default = known["keys"][key]
        if stored[name] != default and (stored[name] or default):
            raise UnsupportedModel(
                f"config.json: {name} {stored[name]!r} is not supported for {architecture}, "
                f"only {default!r}"
            )
    if unknown:
        _warn(architecture, ", ".join(sorted(unknown)))


@cache
def _warn(architecture: str, names: str) -> None:
    logger.warning(
        "config.json has keys that are not read for %s: %s; if they change what the model "
        "computes, its answers are wrong",
        architecture,
        names,
    )


def _known(architecture: str, stored: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of the class of a text model, and their aliases."""
    kind = stored.get("model_type")
    if architecture == "Mistral3ForConditionalGeneration":
        name = "Ministral3ForCausalLM" if kind == "ministral3" else "MistralForCausalLM"
    elif kind in _classes():
        name = kind
    elif architecture.startswith(("SmolVLM", "Idefics3")):
        name = "LlamaForCausalLM"
    elif architecture.startswith(("Llava", "InternVL")):
        name = f"{str(kind).capitalize()}ForCausalLM"
    elif architecture.startswith(("Qwen2VL", "Qwen2_5_VL")):
        name = architecture
    else:
        name = architecture.replace("ForConditionalGeneration", "ForCausalLM")
    known = _classes().get(name)
    # The keys of a plugin's class are unknown: its family reads them with its own defaults.
    return {"keys": {}, "aliases": {}} if known is None else known


@cache
def _classes() -> dict[str, dict[str, Any]]:
    """Return the output of scripts/write_family_defaults.py."""
    content: dict[str, dict[str, Any]] = json.loads(
        (Path(__file__).parent / "defaults.json").read_text(encoding="utf-8")
    )
    return content
