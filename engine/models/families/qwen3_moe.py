"""Qwen 3 with experts in all or some layers."""

from msgspec.structs import replace

from engine.models.families.family import Config, Family
from engine.models.families.placing import llama_weights
from engine.models.families.reading import integer, layer_windows, llama_spec
from engine.models.spec import ModelSpec, MoeSpec


def _spec(config: Config) -> ModelSpec:
    layers = integer(config, "num_hidden_layers")
    step = config.get("decoder_sparse_step") or 1
    dense = set(config.get("mlp_only_layers") or ())
    experts = "num_experts" if "num_experts" in config else "num_local_experts"
    moe = MoeSpec(
        num_experts=integer(config, experts),
        experts_per_token=integer(config, "num_experts_per_tok"),
        intermediate_size=integer(config, "moe_intermediate_size"),
        normalize_weights=bool(config.get("norm_topk_prob") or False),
        layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
    )
    spec = llama_spec({"intermediate_size": moe.intermediate_size, **config})
    return replace(
        spec,
        intermediate_size=0 if all(moe.layers) else integer(config, "intermediate_size"),
        qk_norm="head",
        windows=layer_windows(config) if config.get("use_sliding_window") else spec.windows,
        moe=moe,
    )


FAMILY = Family(architectures=("Qwen3MoeForCausalLM",), spec=_spec, weights=llama_weights)
