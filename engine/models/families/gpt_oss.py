"""GPT-OSS: attention sinks, every other layer sliding, experts with biases and bounded gates."""

from functools import partial

from msgspec.structs import replace

from engine.models.families.config_fields import expert_layers, layer_windows, llama_spec, number
from engine.models.families.family import Config, Family
from engine.models.families.tensor_names import LLAMA_NAMES, stacked_experts
from engine.models.spec import ClampSpec, ModelSpec

_NAMES = {**LLAMA_NAMES, "router": "router"}


def _spec(config: Config) -> ModelSpec:
    stored = config.get("quantization_config") or {}
    is_mxfp4 = stored.get("quant_method") == "mxfp4"
    return replace(
        expert_layers(llama_spec(config), config, bias=True, is_mxfp4=is_mxfp4),
        windows=layer_windows(config, pattern=2),
        attention_sinks=True,
        clamp=ClampSpec(
            limit=number(config, "swiglu_limit", 7.0), slope=number(config, "swiglu_alpha", 1.702)
        ),
    )


FAMILY = Family(
    architectures=("GptOssForCausalLM",),
    spec=_spec,
    weights=partial(
        stacked_experts,
        names=_NAMES,
        gate_up="experts.gate_up_proj",
        down="experts.down_proj",
        is_transposed=True,
        alternate=True,
    ),
    ignored=("experts_per_token", "initial_context_length"),
)
