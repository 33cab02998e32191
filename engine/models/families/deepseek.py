"""DeepSeek V2, V3, R1 and Kimi K2: latent attention; grouped experts after the first layers."""

from functools import partial
from math import log

from msgspec.structs import replace

from engine.models.families.config_fields import grouped_experts, integer, llama_spec, read_rope
from engine.models.families.family import Config, Family
from engine.models.families.tensor_names import CORRECTED_NAMES, named_weights
from engine.models.spec import LatentSpec, ModelSpec, MoeSpec, RopeSpec, UnsupportedModel

_NAMES = {
    **CORRECTED_NAMES,
    "q_a_norm": "q_a_layernorm",
    "kv_a_proj": "kv_a_proj_with_mqa",
    "kv_a_norm": "kv_a_layernorm",
}
_LATENT_EPS = 1e-6


def _spec(config: Config) -> ModelSpec:
    is_v3 = config["architectures"][0] == "DeepseekV3ForCausalLM"
    _refuse(config, is_v3)
    rope = read_rope(config, interleaved=not is_v3 or bool(config["rope_interleave"]))
    spec = llama_spec(config, rope=rope)
    latent = LatentSpec(
        rank=integer(config, "kv_lora_rank"),
        query_rank=None if config.get("q_lora_rank") is None else integer(config, "q_lora_rank"),
        plain_size=integer(config, "qk_nope_head_dim"),
        rotated_size=integer(config, "qk_rope_head_dim"),
        value_size=integer(config, "v_head_dim"),
        eps=_LATENT_EPS,
    )
    return replace(
        spec,
        num_kv_heads=1,
        head_dim=latent.rank + latent.rotated_size,
        latent=latent,
        attention_scale=_scale(latent, rope),
        moe=grouped_experts(config) if is_v3 else _v2_experts(config),
    )


def _refuse(config: Config, is_v3: bool) -> None:
    """Raise UnsupportedModel for settings of no published model, naming them."""
    if config.get("attention_bias") and config.get("q_lora_rank") is None:
        raise UnsupportedModel("config.json: attention_bias needs q_lora_rank")
    if integer(config, "qk_rope_head_dim") % 2:
        odd = config["qk_rope_head_dim"]
        raise UnsupportedModel(f"config.json: qk_rope_head_dim {odd} cannot be rotated in pairs")
    scoring = "sigmoid" if is_v3 else "softmax"
    for key, known in (("mlp_bias", False), ("moe_layer_freq", 1), ("scoring_func", scoring)):
        if config.get(key, known) != known:
            raise UnsupportedModel(f"config.json: {key} {config[key]!r} is not supported")


def _v2_experts(config: Config) -> MoeSpec:
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModel(f"config.json: topk_method {method!r} is not supported")
    if config.get("norm_topk_prob"):
        raise UnsupportedModel("config.json: norm_topk_prob is not supported for DeepSeek V2")
    groups = {} if method != "greedy" else {"n_group": 1, "topk_group": 1}
    moe = grouped_experts(config.replaced(**groups), best_of_group=1)
    return replace(moe, scoring="softmax", has_correction=False)


def _scale(latent: LatentSpec, rope: RopeSpec) -> float:
    """Return the scale of scores; `mscale_all_dim` applies to scores, not to rotated dimensions."""
    plain = float((latent.plain_size + latent.rotated_size) ** -0.5)
    if not rope.mscale_all_dim or rope.factor <= 1:
        return plain
    return plain * (0.1 * rope.mscale_all_dim * log(rope.factor) + 1) ** 2


FAMILY = Family(
    architectures=("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
    spec=_spec,
    weights=partial(named_weights, names=_NAMES),
    has_draft_layers=True,
    ignored=("topk_method", "head_dim"),
)
