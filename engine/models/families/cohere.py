"""Command R, R+ and R7B, Command A: parallel attention and MLP behind one LayerNorm."""

from msgspec.structs import replace

from engine.models.families.config_fields import layer_windows, llama_spec, number, read_rope
from engine.models.families.family import Config, Family
from engine.models.families.tensor_names import llama_weights
from engine.models.spec import ModelSpec, NormSpec


def _spec(config: Config) -> ModelSpec:
    is_second = config["architectures"] == ["Cohere2ForCausalLM"]
    spec = replace(
        llama_spec(config, rope=read_rope(config, interleaved=True)),
        norm=NormSpec(kind="layer", eps=number(config, "layer_norm_eps", 1e-5)),
        block="parallel",
        qk_norm="each_head" if config.get("use_qk_norm") else "none",
        logits_scale=number(config, "logit_scale", 0.0625),
    )
    if not is_second:
        return spec
    windows = layer_windows(config, pattern=config.get("sliding_window_pattern") or 4)
    # Only sliding layers have positional encoding.
    ropes = tuple(
        None if window is None else rope for rope, window in zip(spec.ropes, windows, strict=True)
    )
    return replace(spec, windows=windows, ropes=ropes)


FAMILY = Family(
    architectures=("CohereForCausalLM", "Cohere2ForCausalLM"),
    spec=_spec,
    weights=llama_weights,
    ignored=(
        "layer_switch",
        "order_of_interleaved_layers",
        "position_embedding_type",
        "rotary_pct",
        "use_embedding_sharing",
        "use_gated_activation",
        "use_parallel_block",
        "use_parallel_embedding",
    ),
)
