"""Gemma 3 (of its larger versions the text model): one layer in six sees everything."""

from msgspec.structs import replace

from engine.models.families.family import Config, Family
from engine.models.families.gemma2 import gemma_spec, gemma_weights
from engine.models.families.reading import cap, layer_windows, layered_ropes
from engine.models.spec import ModelSpec

_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
"""What the configs of the larger versions leave out."""


def _spec(config: Config) -> ModelSpec:
    config = {**_DEFAULTS, **config}
    windows = layer_windows(config, pattern=config.get("sliding_window_pattern") or 6)
    whole, local = layered_ropes(config, theta=1e6, local_theta=1e4)
    return replace(
        gemma_spec(config, whole),
        qk_norm="head",
        windows=windows,
        ropes=tuple(whole if window is None else local for window in windows),
        attention_softcap=cap(config, "attn_logit_softcapping", None),
        logits_softcap=cap(config, "final_logit_softcapping", None),
    )


FAMILY = Family(
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    spec=_spec,
    weights=gemma_weights,
    text_prefixes=("model.", "language_model.model.", "model.language_model."),
    not_text=(
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ),
)
