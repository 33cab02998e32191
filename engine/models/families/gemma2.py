"""Gemma 2: norms around attention and MLP, capped scores and logits, every other layer sliding."""

from functools import partial

from msgspec.structs import replace

from engine.models.families.config_fields import (
    cap,
    layer_windows,
    llama_spec,
    number,
    read_activation,
    read_rope,
)
from engine.models.families.family import Config, Family
from engine.models.families.tensor_names import named_weights
from engine.models.spec import ModelSpec, RopeSpec, UnsupportedModel

_NAMES = {
    "attention_norm": "input_layernorm",
    "attention_output_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}


def _spec(config: Config) -> ModelSpec:
    return replace(
        gemma_spec(config, read_rope(config)),
        windows=layer_windows(config, pattern=2),
        attention_softcap=cap(config, "attn_logit_softcapping"),
        logits_softcap=cap(config, "final_logit_softcapping"),
    )


def gemma_spec(config: Config, rope: RopeSpec) -> ModelSpec:
    """Return what Gemma 2 and 3 have in common.

    Raises:
        UnsupportedModel: names the unsupported or missing setting.
    """
    if config.get("use_bidirectional_attention"):
        raise UnsupportedModel("config.json: use_bidirectional_attention is not supported")
    # Older configs have a wrong activation under `hidden_act`.
    activation = read_activation(config, "hidden_activation")
    spec = llama_spec(config.replaced(hidden_act="silu"), rope=rope)
    return replace(
        spec,
        block="around",
        norm=replace(spec.norm, adds_one=True),
        activation=activation,
        embedding_scale=spec.hidden_size**0.5,
        attention_scale=number(config, "query_pre_attn_scalar", 256) ** -0.5,
    )


gemma_weights = partial(named_weights, names=_NAMES)
"""Returns the location of each tensor."""


FAMILY = Family(
    architectures=("Gemma2ForCausalLM",),
    spec=_spec,
    weights=gemma_weights,
    ignored=("sliding_window_size",),
)
