"""ERNIE 4.5: rotary embedding in adjacent pairs; some versions have experts and a shared MLP."""

from msgspec.structs import replace

from engine.models.families.config_fields import integer, llama_spec, number, read_rope
from engine.models.families.family import Config, Family
from engine.models.families.tensor_names import LLAMA_NAMES, stored_name
from engine.models.spec import ModelSpec, MoeSpec, UnsupportedModel
from engine.models.weights import Shape, Source, WeightMap, weight_map


def _spec(config: Config) -> ModelSpec:
    has_bias = bool(config.get("use_bias"))
    config = config.replaced(attention_bias=has_bias, mlp_bias=has_bias)
    spec = llama_spec(config, rope=read_rope(config, interleaved=True))
    if config["architectures"][0] == "Ernie4_5ForCausalLM":
        return spec
    if has_bias:
        raise UnsupportedModel("config.json: use_bias is not supported for ERNIE 4.5 with experts")
    return replace(spec, moe=_experts(config, spec.num_layers))


def _experts(config: Config, num_layers: int) -> MoeSpec:
    size = integer(config, "moe_intermediate_size")
    first, last = config["moe_layer_start_index"], config["moe_layer_end_index"]
    interval = integer(config, "moe_layer_interval")
    last = num_layers - 1 if last < 0 else last
    return MoeSpec(
        num_experts=integer(config, "moe_num_experts"),
        experts_per_token=integer(config, "moe_k"),
        intermediate_size=size,
        normalize_weights=True,
        layers=tuple(
            first <= layer <= last and (layer + 1) % interval == 0 for layer in range(num_layers)
        ),
        has_correction=True,
        in_float32=True,
        shared_size=int(number(config, "moe_num_shared_experts", 2)) * size,
    )


def _weights(spec: ModelSpec) -> WeightMap:
    def place(name: str, shape: Shape) -> Source:
        if name.endswith(".router.correction"):
            stored = name.replace(".router.correction", ".moe_statics.e_score_correction_bias")
            return Source(name=stored, shape=(1, *shape), index=0)
        return Source(name=stored_name(name, LLAMA_NAMES), shape=shape)

    return weight_map(spec, place)


FAMILY = Family(
    architectures=("Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM"),
    spec=_spec,
    weights=_weights,
    ignored=(
        "compression_ratio",
        "moe_capacity",
        "moe_gate",
        "moe_use_aux_free",
    ),
    not_text=("model.mtp_",),  # layers that draft tokens
)
