"""Which class of transformers a model is, and why some of them cannot be served."""

from typing import Any

from engine.models.spec import UnsupportedModel
from engine.shared.plugins import install_command

_STATES = ("mamba", "linear_attention", "conv", "recurrent", "recurrence", "lightning", "rwkv")
"""Words in the types of layers that keep a state of a sequence beside keys and values."""
_SEEN_LAYERS = {"full_attention", "sliding_attention"}
_CHANGING_ROPES = {"dynamic", "longrope"}
_REFUSED = {
    "Llama4ForCausalLM": "its queries are scaled by the place in a step, not by the position",
    "RobertaPreLayerNormForCausalLM": "it counts positions from behind its padding token",
}
"""What is wrong with classes whose results differ too little in a trial, or for long sequences."""


def transformers_class(config: dict[str, Any]) -> Any:
    """Return the class that computes a model, by its decoded config.json.

    Raises:
        UnsupportedModel: transformers is not installed, or has no class for it that can be served.
    """
    try:
        import transformers
        from transformers.models.auto import modeling_auto
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise UnsupportedModel(
            f"{_named(config)} is not built in, and the transformers backend, which might compute "
            f"it, is not installed: {install_command('transformers')}"
        ) from error
    kind, name = str(config.get("model_type")), _named(config)
    if kind not in CONFIG_MAPPING:
        if "auto_map" in config:
            raise refusal(name, "it needs code from its repository, which is never run")
        raise refusal(name, f"transformers {transformers.__version__} does not know it")
    if config.get("is_encoder_decoder"):
        raise refusal(name, "it is an encoder with a decoder")
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if causal is None or causal != name:
        raise refusal(name, _other_purpose(modeling_auto, kind, name))
    if causal.endswith("ForConditionalGeneration"):
        raise refusal(name, "it is multimodal, and its text model is not a class of its own")
    return getattr(transformers, causal)


def check_class(model_class: Any, config: Any) -> None:
    """Refuse what keeps more of a sequence than keys and values, or attends in its own way.

    Args:
        model_class: of transformers.
        config: its configuration, an object of transformers.

    Raises:
        UnsupportedModel: saying which.
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
            raise refusal(name, f"its {rope} rotary embedding depends on the longest of a step")
    if getattr(config, "quantization_config", None) is not None:
        raise refusal(name, "its checkpoint is quantized, which is read for families only")


def refusal(name: str, reason: str) -> UnsupportedModel:
    """Return the error for a model that neither a family nor transformers can serve."""
    return UnsupportedModel(
        f"architecture {name} is not supported: there is no family for it (docs/models.md), and "
        f"as transformers computes it, it cannot be served: {reason}"
    )


def _named(config: dict[str, Any]) -> str:
    names = config.get("architectures") or []
    return str(names[0]) if names else f"none (model_type {config.get('model_type')!r})"


def _other_purpose(modeling_auto: Any, kind: str, name: str) -> str:
    """Say what a model is for, if not for continuing text."""
    purposes = {
        "an encoder with a decoder": "SEQ_TO_SEQ_CAUSAL_LM",
        "multimodal; --engine-backend vllm may serve it": "IMAGE_TEXT_TO_TEXT",
        "multimodal, with sound": "SPEECH_SEQ_2_SEQ",
        "an encoder": "MASKED_LM",
    }
    for what, mapping in purposes.items():
        if getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {}).get(kind) == name:
            return f"it is {what}"
    return "it is no causal language model of transformers"


def _ropes(text: Any) -> list[str]:
    """Return the kinds of the rotary embeddings of a configuration."""
    stated = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if not isinstance(stated, dict):
        return []
    each = [part for part in stated.values() if isinstance(part, dict)] or [stated]
    return [str(part.get("rope_type", part.get("type", "default"))) for part in each]
