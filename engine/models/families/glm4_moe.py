"""GLM-4.5 to 4.7: experts behind the first layers, one MLP beside them, half-rotated heads."""

from msgspec.structs import replace

from engine.models.families.family import Config, Family
from engine.models.families.placing import LLAMA_NAMES, named_weights
from engine.models.families.reading import integer, llama_spec, number, read_rope
from engine.models.spec import ModelSpec, MoeSpec, UnsupportedModel
from engine.models.weights import WeightMap

_NAMES = {**LLAMA_NAMES, "correction": "e_score_correction_bias"}


def _spec(config: Config) -> ModelSpec:
    spec = llama_spec(config, eps=1e-5, rope=read_rope(config, share=0.5))
    dense = number(config, "first_k_dense_replace", 1)
    size = integer(config, "moe_intermediate_size")
    experts = "n_routed_experts" if "n_routed_experts" in config else "num_local_experts"
    moe = MoeSpec(
        num_experts=integer(config, experts),
        experts_per_token=integer(config, "num_experts_per_tok"),
        intermediate_size=size,
        normalize_weights=bool(config.get("norm_topk_prob", True)),
        layers=tuple(layer >= dense for layer in range(spec.num_layers)),
        scoring="sigmoid",
        num_groups=integer({"n_group": 1, **config}, "n_group"),
        groups_per_token=integer({"topk_group": 1, **config}, "topk_group"),
        weights_scale=number(config, "routed_scaling_factor", 1.0),
        shared_size=int(number(config, "n_shared_experts", 1)) * size,
    )
    uneven = moe.num_experts % moe.num_groups or moe.num_experts < 2 * moe.num_groups
    if uneven or moe.groups_per_token > moe.num_groups:
        raise UnsupportedModel(
            f"config.json: n_group {moe.num_groups} and topk_group {moe.groups_per_token} do not "
            f"suit {moe.num_experts} experts"
        )
    return replace(
        spec, output_bias=False, qk_norm="head" if config.get("use_qk_norm") else "none", moe=moe
    )


def _weights(spec: ModelSpec) -> WeightMap:
    return named_weights(spec, _NAMES)


FAMILY = Family(
    architectures=("Glm4MoeForCausalLM",), spec=_spec, weights=_weights, has_draft_layers=True
)
