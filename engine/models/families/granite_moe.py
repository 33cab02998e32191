"""Granite 3 with experts in every layer, whose tensors are stacked."""

from functools import partial

from msgspec.structs import replace

from engine.models.families.family import Config, Family
from engine.models.families.granite import granite_spec
from engine.models.families.placing import LLAMA_NAMES, stacked_experts
from engine.models.families.reading import integer
from engine.models.spec import ModelSpec, MoeSpec

_NAMES = {**LLAMA_NAMES, "mlp": "block_sparse_moe", "router": "router.layer"}


def _spec(config: Config) -> ModelSpec:
    spec = granite_spec(config)
    return replace(
        spec,
        intermediate_size=0,
        output_bias=spec.qkv_bias,
        moe=MoeSpec(
            num_experts=integer(config, "num_local_experts"),
            experts_per_token=integer(config, "num_experts_per_tok"),
            intermediate_size=spec.intermediate_size,
            # The softmax over the chosen experts' scores is the same.
            normalize_weights=True,
            layers=(True,) * spec.num_layers,
        ),
    )


FAMILY = Family(
    architectures=("GraniteMoeForCausalLM",),
    spec=_spec,
    weights=partial(
        stacked_experts, names=_NAMES, gate_up="input_linear.weight", down="output_linear.weight"
    ),
)
