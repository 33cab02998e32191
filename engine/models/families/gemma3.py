"""Gemma 3 (of its larger versions the text model): one layer in six sees everything."""

from msgspec.structs import replace

from engine.models.families.family import Config, Family
from engine.models.families.gemma2 import gemma_spec, gemma_weights
from engine.models.families.reading import cap, layer_windows, layered_ropes
from engine.models.spec import ModelSpec


def _spec(config: Config) -> ModelSpec:
    windows = layer_windows(config, pattern=config.get("sliding_window_pattern") or 6)
    whole, local = layered_ropes(config)
    return replace(
        gemma_spec(config, whole),
        qk_norm="head",
        windows=windows,
        ropes=tuple(whole if window is None else local for window in windows),
        attention_softcap=cap(config, "attn_logit_softcapping"),
        logits_softcap=cap(config, "final_logit_softcapping"),
    )


FAMILY = Family(
    architectures=("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    spec=_spec,
    weights=gemma_weights,
    ignored=("_sliding_window_pattern",),
    text_prefixes=("model.", "language_model.model.", "model.language_model."),
    not_text=(
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ),
)
