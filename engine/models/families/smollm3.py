"""SmolLM 3: every fourth layer has no positional encoding."""

from msgspec.structs import replace

from engine.models.families.config_fields import llama_spec, rotated_layers, switched_window
from engine.models.families.family import Config, Family
from engine.models.families.tensor_names import llama_weights
from engine.models.spec import ModelSpec, UnsupportedModel


def _spec(config: Config) -> ModelSpec:
    spec = llama_spec(config)
    rotates = rotated_layers(config)
    if len(rotates) < spec.num_layers:
        raise UnsupportedModel("config.json: no_rope_layers has fewer entries than layers")
    ropes = tuple(
        rope if rotated else None for rope, rotated in zip(spec.ropes, rotates, strict=False)
    )
    window = switched_window(config)
    kinds = config.get("layer_types") or [
        "full_attention" if rope else "sliding_attention" for rope in ropes
    ]
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return replace(spec, ropes=ropes, windows=windows)


FAMILY = Family(
    architectures=("SmolLM3ForCausalLM",),
    spec=_spec,
    weights=llama_weights,
    ignored=("max_window_layers",),
)
