"""Mixtral: experts in every layer."""

from functools import partial

from msgspec.structs import replace

from engine.models.families.family import Config, Family
from engine.models.families.placing import LLAMA_NAMES, named_weights
from engine.models.families.reading import integer, llama_spec, uniform_windows
from engine.models.spec import ModelSpec, MoeSpec

_NAMES = {
    **LLAMA_NAMES,
    "mlp": "block_sparse_moe",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}


def _spec(config: Config) -> ModelSpec:
    spec = llama_spec(config)
    return replace(
        spec,
        intermediate_size=0,
        windows=uniform_windows(config),
        moe=MoeSpec(
            num_experts=integer(config, "num_local_experts"),
            experts_per_token=integer(config, "num_experts_per_tok"),
            intermediate_size=spec.intermediate_size,
            normalize_weights=True,
            layers=(True,) * spec.num_layers,
        ),
    )


FAMILY = Family(
    architectures=("MixtralForCausalLM",), spec=_spec, weights=partial(named_weights, names=_NAMES)
)
