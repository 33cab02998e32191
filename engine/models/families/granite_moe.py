"""Granite 3 with experts in every layer, whose tensors are stacked."""

from msgspec.structs import replace

from engine.models.families.family import Config, Family
from engine.models.families.granite import granite_spec
from engine.models.families.placing import LLAMA_NAMES, stored_name
from engine.models.families.reading import integer
from engine.models.spec import ModelSpec, MoeSpec
from engine.models.weights import Shape, Source, WeightMap, weight_map

_NAMES = {**LLAMA_NAMES, "mlp": "block_sparse_moe", "router": "router.layer"}


def _spec(config: Config) -> ModelSpec:
    spec = granite_spec(config)
    return replace(
        spec,
        intermediate_size=0,
        output_bias=spec.qkv_bias,
        moe=MoeSpec(
            num_experts=integer({"num_local_experts": 8, **config}, "num_local_experts"),
            experts_per_token=integer({"num_experts_per_tok": 2, **config}, "num_experts_per_tok"),
            intermediate_size=spec.intermediate_size,
            # The softmax over the chosen experts' scores is the same.
            normalize_weights=True,
            layers=(True,) * spec.num_layers,
        ),
    )


def _weights(spec: ModelSpec) -> WeightMap:
    assert spec.moe is not None
    experts, inner, hidden = spec.moe.num_experts, spec.moe.intermediate_size, spec.hidden_size

    def place(name: str, shape: Shape) -> Source:
        if ".experts." not in name:
            return Source(name=stored_name(name, _NAMES), shape=shape)
        block, _, place = name.partition(".experts.")
        number, part, _ = place.split(".")
        block = stored_name(block, _NAMES)
        if part == "down_proj":
            whole = (experts, hidden, inner)
            return Source(name=f"{block}.output_linear.weight", shape=whole, index=int(number))
        return Source(
            name=f"{block}.input_linear.weight",
            shape=(experts, 2 * inner, hidden),
            index=int(number),
            first_row=0 if part == "gate_proj" else inner,
            num_rows=inner,
        )

    return weight_map(spec, place)


FAMILY = Family(architectures=("GraniteMoeForCausalLM",), spec=_spec, weights=_weights)
