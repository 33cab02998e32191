"""Maps a model to its transformers class, and refuses classes that cannot be served."""

from typing import Any

from engine.models.spec import UnsupportedModel
from engine.shared.plugins import install_command

_STATES = ("mamba", "linear_attention", "conv", "recurrent", "recurrence", "lightning", "rwkv")
"""Substrings of the types of layers that keep recurrent state beside keys and values."""
_SEEN_LAYERS = {"full_attention", "sliding_attention"}
_CHANGING_ROPES = {"dynamic", "longrope"}
_REFUSED = {
    "Llama4ForCausalLM": "its queries are scaled by index in a step, not by position",
    "RobertaPreLayerNormForCausalLM": "its positions start after its padding token",
}
"""Reasons to refuse classes whose errors are too small for the trial or show only in long
sequences."""


def transformers_class(config: dict[str, Any]) -> Any:
    """Return the class that computes a model, given its decoded config.json.

    Raises:
        UnsupportedModel: transformers is not installed, or has no class that can be served.
    """
    try:
        import transformers
        from transformers.models.auto import modeling_auto
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise UnsupportedModel(
            f"{_named(config)} is not built in, and the transformers backend, which might support "
            f"it, is not installed: {install_command('transformers')}"
        ) from error
    kind, name = str(config.get("model_type")), _named(config)
    if kind not in CONFIG_MAPPING:
        if "auto_map" in config:
            raise refusal(name, "it needs code from its repository, which is never run")
        raise refusal(name, f"transformers {transformers.__version__} does not support it")
    if config.get("is_encoder_decoder"):
        raise refusal(name, "it is an encoder-decoder model")
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if causal is None or causal != name:
        raise refusal(name, _other_purpose(modeling_auto, kind, name))
    if causal.endswith("ForConditionalGeneration"):
        raise refusal(name, "it is multimodal, and its text model has no separate class")
    return getattr(transformers, causal)


def check_class(model_class: Any, config: Any) -> None:
    """Refuse classes with more state than keys and values, or their own attention.

    Args:
        model_class: class of transformers.
        config: its configuration, an object of transformers.

    Raises:
        UnsupportedModel: states the reason.
    """
    name, text = model_class.__name__, config.get_text_config()
    if name in _REFUSED:
        raise refusal(name, _REFUSED[name])
    layers = {str(kind) for kind in getattr(text, "layer_types", None) or ()}
    states = sorted(kind for kind in layers if any(word in kind for word in _STATES))
    if states or model_class._is_stateful:
        of = f" ({', '.join(states)})" if states else ""
        raise refusal(name, f"its layers keep a recurrent state{of}")
    if layers - _SEEN_LAYERS:
        raise refusal(name, f"layers of type {', '.join(sorted(layers - _SEEN_LAYERS))}")
    if not model_class._supports_attention_backend:
        raise refusal(name, "it does not use the attention interface of transformers")
    for rope in _ropes(text):
        if rope in _CHANGING_ROPES:
            raise refusal(name, f"its {rope} rotary embedding depends on the step's longest row")
    if getattr(config, "quantization_config", None) is not None:
        raise refusal(name, "its checkpoint is quantized, which is only supported for families")


def refusal(name: str, reason: str) -> UnsupportedModel:
    """Return the error for a model that neither a family nor transformers can serve."""
    return UnsupportedModel(
        f"architecture {name} is not supported: it has no family (docs/models.md), and with "
        f"transformers it cannot be served: {reason}"
    )


def _named(config: dict[str, Any]) -> str:
    names = config.get("architectures") or []
    return str(names[0]) if names else f"none (model_type {config.get('model_type')!r})"


def _other_purpose(modeling_auto: Any, kind: str, name: str) -> str:
    """Return what a model is for, if not for causal language modelling."""
    purposes = {
        "an encoder-decoder model": "SEQ_TO_SEQ_CAUSAL_LM",
        "multimodal; --engine-backend vllm may serve it": "IMAGE_TEXT_TO_TEXT",
        "multimodal, with sound": "SPEECH_SEQ_2_SEQ",
        "an encoder": "MASKED_LM",
    }
    for what, mapping in purposes.items():
        if getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {}).get(kind) == name:
            return f"it is {what}"
    return "it is not a causal language model of transformers"


def _ropes(text: Any) -> list[str]:
    """Return the kinds of the rotary embeddings of a configuration."""
    stated = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if not isinstance(stated, dict):
        return []
    each = [part for part in stated.values() if isinstance(part, dict)] or [stated]
    return [str(part.get("rope_type", part.get("type", "default"))) for part in each]
