"""OLMo 2 and 3: norms after attention and MLP, and over all queries; most layers of 3 slide."""

from functools import partial

from msgspec.structs import replace

from engine.models.families.config_fields import layer_windows, layered_ropes, llama_spec
from engine.models.families.family import Config, Family
from engine.models.families.tensor_names import named_weights
from engine.models.spec import ModelSpec

_NAMES = {
    "attention_output_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}


def _spec(config: Config) -> ModelSpec:
    if config["architectures"] != ["Olmo3ForCausalLM"]:
        return replace(llama_spec(config), block="after", qk_norm="width")
    full, local = layered_ropes(config)
    windows = layer_windows(config, pattern=4)
    ropes = tuple(full if window is None else local for window in windows)
    spec = llama_spec(config, rope=full)
    return replace(spec, block="after", qk_norm="width", windows=windows, ropes=ropes)


FAMILY = Family(
    architectures=("Olmo2ForCausalLM", "Olmo3ForCausalLM"),
    spec=_spec,
    weights=partial(named_weights, names=_NAMES),
)
