"""Qwen 2 and 2.5, with biases on queries, keys and values; Qwen 3, with norms, and its MoE."""

from msgspec.structs import replace

from engine.models.families.config_fields import (
    integer,
    layer_windows,
    llama_spec,
    switched_window,
    uniform_windows,
)
from engine.models.families.family import Config, Family
from engine.models.families.tensor_names import llama_weights
from engine.models.spec import ModelSpec, MoeSpec


def qwen_windows(config: Config) -> tuple[int | None, ...]:
    """Return each layer's window: `use_sliding_window` enables them from `max_window_layers` on."""
    layers, first = integer(config, "num_hidden_layers"), config.get("max_window_layers")
    window, kinds = switched_window(config), config.get("layer_types")
    if kinds is not None:
        return layer_windows(config.replaced(sliding_window=window))
    return tuple(window if layer >= first else None for layer in range(layers))


def _qwen_2(config: Config) -> ModelSpec:
    return replace(
        llama_spec(config), qkv_bias=True, output_bias=False, windows=qwen_windows(config)
    )


def _qwen_3(config: Config) -> ModelSpec:
    return replace(llama_spec(config), qk_norm="head", windows=qwen_windows(config))


def _qwen_3_moe(config: Config) -> ModelSpec:
    layers = integer(config, "num_hidden_layers")
    step = config.get("decoder_sparse_step") or 1
    dense = set(config.get("mlp_only_layers") or ())
    moe = MoeSpec(
        num_experts=integer(config, "num_local_experts"),
        experts_per_token=integer(config, "num_experts_per_tok"),
        intermediate_size=integer(config, "moe_intermediate_size"),
        normalize_weights=bool(config.get("norm_topk_prob") or False),
        layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
    )
    spec = llama_spec(config)
    return replace(
        spec,
        intermediate_size=0 if all(moe.layers) else spec.intermediate_size,
        qk_norm="head",
        windows=uniform_windows(config.replaced(sliding_window=switched_window(config))),
        moe=moe,
    )


QWEN_2 = Family(
    architectures=("Qwen2ForCausalLM",),
    spec=_qwen_2,
    weights=llama_weights,
    ignored=("use_mrope",),
)

QWEN_3 = Family(architectures=("Qwen3ForCausalLM",), spec=_qwen_3, weights=llama_weights)

QWEN_3_MOE = Family(
    architectures=("Qwen3MoeForCausalLM",),
    spec=_qwen_3_moe,
    weights=llama_weights,
    ignored=(
        "max_window_layers",
        "qkv_bias",
        "shared_expert_intermediate_size",
        "use_qk_norm",
    ),
)
