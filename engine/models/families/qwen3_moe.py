"""Qwen 3 with experts in all or some layers."""

from msgspec.structs import replace

from engine.models.families.family import Config, Family
from engine.models.families.placing import llama_weights
from engine.models.families.reading import (
    integer,
    llama_spec,
    switched_window,
    uniform_windows,
)
from engine.models.spec import ModelSpec, MoeSpec


def _spec(config: Config) -> ModelSpec:
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
        windows=uniform_windows(config.but(sliding_window=switched_window(config))),
        moe=moe,
    )


FAMILY = Family(
    architectures=("Qwen3MoeForCausalLM",),
    spec=_spec,
    weights=llama_weights,
    ignored=(
        "max_window_layers",
        "qkv_bias",
        "shared_expert_intermediate_size",
        "use_qk_norm",
    ),
)
