"""Granite 3: Llama with multipliers of embeddings, scores, residuals and logits.

Some have experts in every layer, stored in stacked tensors.
"""

from functools import partial

from msgspec.structs import replace

from engine.models.families.config_fields import expert_layers, llama_spec, number
from engine.models.families.family import Config, Family
from engine.models.families.tensor_names import LLAMA_NAMES, llama_weights, stacked_experts
from engine.models.spec import ModelSpec

_MOE_NAMES = {**LLAMA_NAMES, "mlp": "block_sparse_moe", "router": "router.layer"}


def _dense(config: Config) -> ModelSpec:
    return replace(
        llama_spec(config),
        embedding_scale=number(config, "embedding_multiplier", 1.0),
        attention_scale=number(config, "attention_multiplier", 1.0),
        residual_scale=number(config, "residual_multiplier", 1.0),
        logits_scale=1 / number(config, "logits_scaling", 1.0),
    )


def _moe(config: Config) -> ModelSpec:
    spec = expert_layers(_dense(config), config)
    return replace(spec, output_bias=spec.qkv_bias)


FAMILY = Family(architectures=("GraniteForCausalLM",), spec=_dense, weights=llama_weights)

MOE = Family(
    architectures=("GraniteMoeForCausalLM",),
    spec=_moe,
    weights=partial(
        stacked_experts,
        names=_MOE_NAMES,
        gate_up="input_linear.weight",
        down="output_linear.weight",
    ),
)
