"""Reads config.json keys shared by most families.

Both spellings in use are supported: `rope_theta` and `rope_scaling` (transformers 4) and
`rope_parameters` (transformers 5).
"""

from typing import Any, Literal, get_args

import msgspec

from engine.models.families.config import Config
from engine.models.spec import (
    ModelSpec,
    MoeSpec,
    NormSpec,
    RopeKind,
    RopeSpec,
    SiglipSpec,
    UnsupportedModel,
)

Activation = Literal["silu", "gelu_tanh"]

_ROPE_KINDS: tuple[str, ...] = get_args(RopeKind)
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def llama_spec(config: Config, *, rope: RopeSpec | None = None) -> ModelSpec:
    """Return the spec of a plain Llama model.

    Args:
        rope: rotary embedding of all layers; default: read as for Llama.

    Raises:
        UnsupportedModel: names the unsupported or missing setting.
    """
    heads, hidden = integer(config, "num_attention_heads"), integer(config, "hidden_size")
    layers = integer(config, "num_hidden_layers")
    bias = bool(config.get("attention_bias"))
    if rope is None:
        rope = read_rope(config)
        if rope.share != 1.0:
            raise UnsupportedModel(
                f"config.json: partial_rotary_factor {rope.share} is not supported"
            )
    longest = integer(config, "max_position_embeddings")
    if rope.kind == "yarn":  # such checkpoints specify the length before stretching
        longest = max(longest, int(rope.original_max_position_embeddings * rope.factor))
    return ModelSpec(
        architecture=config["architectures"][0],
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=integer(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        norm=NormSpec(eps=number(config, "rms_norm_eps", 1e-6)),
        ropes=(rope,) * layers,
        max_position_embeddings=longest,
        tie_word_embeddings=bool(config.get("tie_word_embeddings")),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(config.get("mlp_bias")),
        activation=read_activation(config, "hidden_act"),
        windows=(None,) * layers,
    )


def siglip_spec(
    vision_config: dict[str, Any], *, token_id: int, scale_factor: int, is_gemma: bool = False
) -> SiglipSpec:
    """Return the spec of a SigLIP vision encoder.

    Args:
        vision_config: config.json's `vision_config`, with the defaults of its class.
        token_id, scale_factor, is_gemma: see `SiglipSpec`.

    Raises:
        UnsupportedModel: images do not have three channels, or a value is invalid.
    """
    if vision_config["num_channels"] != 3:
        raise UnsupportedModel("config.json: num_channels of vision_config must be 3")
    return SiglipSpec(
        token_id=token_id,
        image_size=integer(vision_config, "image_size"),
        patch_size=integer(vision_config, "patch_size"),
        scale_factor=scale_factor,
        hidden_size=integer(vision_config, "hidden_size"),
        intermediate_size=integer(vision_config, "intermediate_size"),
        num_layers=integer(vision_config, "num_hidden_layers"),
        num_heads=integer(vision_config, "num_attention_heads"),
        activation=vision_config["hidden_act"],
        eps=number(vision_config, "layer_norm_eps", 1e-6),
        is_gemma=is_gemma,
    )


def integer(config: dict[str, Any], key: str) -> int:
    """Return a positive integer.

    Raises:
        UnsupportedModel: the value is missing or not a positive integer.
    """
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"config.json: {key} must be a positive integer, found {value!r}")
    return value


def number(config: dict[str, Any], key: str, default: float) -> float:
    """Return a number.

    Raises:
        UnsupportedModel: the value is not a number.
    """
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnsupportedModel(f"config.json: {key} must be a number, found {value!r}")
    return float(value)


def cap(config: Config, key: str) -> float | None:
    """Return the cap on values, or None.

    Raises:
        UnsupportedModel: it is not a number.
    """
    return None if config.get(key) is None else number(config, key, 0.0)


def read_activation(config: Config, key: str) -> Activation:
    """Return the activation of MLP gates.

    Raises:
        UnsupportedModel: the decoder does not support it.
    """
    name = config.get(key)
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"config.json: {key} {name!r} is not supported, only {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def grouped_experts(config: Config, best_of_group: int = 2) -> MoeSpec:
    """Return sparse layers after some dense ones, with grouped experts and corrected scores.

    Args:
        best_of_group: see `MoeSpec`.

    Raises:
        UnsupportedModel: a number is missing, or the groups do not match the experts.
    """
    layers, size = integer(config, "num_hidden_layers"), integer(config, "moe_intermediate_size")
    dense = number(config, "first_k_dense_replace", 0)
    moe = MoeSpec(
        num_experts=integer(config, "n_routed_experts"),
        experts_per_token=integer(config, "num_experts_per_tok"),
        intermediate_size=size,
        normalize_weights=bool(config.get("norm_topk_prob")),
        layers=tuple(layer >= dense for layer in range(layers)),
        scoring="sigmoid",
        has_correction=True,
        in_float32=True,
        num_groups=integer(config, "n_group"),
        groups_per_token=integer(config, "topk_group"),
        best_of_group=best_of_group,
        weights_scale=number(config, "routed_scaling_factor", 1.0),
        shared_size=int(number(config, "n_shared_experts", 1)) * size,
    )
    in_group = moe.num_experts // moe.num_groups
    suit = moe.num_experts % moe.num_groups == 0 and in_group >= moe.best_of_group
    suit = suit and moe.experts_per_token <= in_group * moe.groups_per_token
    if not suit or moe.groups_per_token > moe.num_groups:
        raise UnsupportedModel(
            f"config.json: n_group {moe.num_groups} and topk_group {moe.groups_per_token} do not "
            f"fit {moe.num_experts} experts with {moe.experts_per_token} per token"
        )
    return moe


def expert_layers(spec: ModelSpec, config: Config, **options: Any) -> ModelSpec:
    """Return a spec with experts in every layer.

    Args:
        spec: its `intermediate_size` is that of an expert.
        options: further fields of `MoeSpec`.

    Raises:
        UnsupportedModel: a number is missing.
    """
    moe = MoeSpec(
        num_experts=integer(config, "num_local_experts"),
        experts_per_token=integer(config, "num_experts_per_tok"),
        intermediate_size=spec.intermediate_size,
        # Equivalent to a softmax over the chosen experts' scores.
        normalize_weights=True,
        layers=(True,) * spec.num_layers,
        **options,
    )
    return msgspec.structs.replace(spec, intermediate_size=0, moe=moe)


def rotated_layers(config: Config) -> list[Any]:
    """Return which layers have rotary embeddings; there can be too few entries."""
    # Despite the key's name, 1 means that the layer is rotated.
    stated: list[Any] | None = config.get("no_rope_layers")
    interval, layers = integer(config, "no_rope_layer_interval"), config["num_hidden_layers"]
    return stated or [(layer + 1) % interval != 0 for layer in range(layers)]


def layer_windows(config: Config, pattern: int | None = None) -> tuple[int | None, ...]:
    """Return each layer's window from `layer_types`.

    Args:
        pattern: without `layer_types`, all layers slide except every `pattern`-th; None: all slide.

    Raises:
        UnsupportedModel: a type is unknown, or there is not one per layer.
    """
    window, layers = config.get("sliding_window"), integer(config, "num_hidden_layers")
    kinds = config.get("layer_types")
    if window is None:
        return (None,) * layers
    if kinds is None:
        return tuple(
            None if pattern is not None and (layer + 1) % pattern == 0 else window
            for layer in range(layers)
        )
    known = ("sliding_attention", "full_attention")
    if len(kinds) != layers or any(kind not in known for kind in kinds):
        raise UnsupportedModel(
            f"config.json: layer_types must name each of {layers} layers one of {known}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def switched_window(config: Config) -> int | None:
    """Return the window if `use_sliding_window` enables it."""
    window: int | None = config.get("sliding_window")
    return window if config.get("use_sliding_window") else None


def uniform_windows(config: Config) -> tuple[int | None, ...]:
    """Return the same window for each layer, for classes that do not read `layer_types`.

    Raises:
        UnsupportedModel: `layer_types` specifies anything else.
    """
    layers, window = integer(config, "num_hidden_layers"), config.get("sliding_window")
    kinds = set(config.get("layer_types") or ())
    if window is not None and not kinds <= {"sliding_attention"}:
        raise UnsupportedModel(
            f"config.json: layer_types: {config['architectures'][0]} has sliding_window {window} "
            "in all layers; classes with different layers have other names (MinistralForCausalLM)"
        )
    return (window,) * layers


def read_rope(config: Config, *, interleaved: bool = False) -> RopeSpec:
    """Return the rotary embedding; `interleaved` as in `RopeSpec`.

    Raises:
        UnsupportedModel: the decoder does not support it.
    """
    return _rope(config, rope_parameters(config), config.get("rope_theta"), interleaved)


def rope_parameters(config: Config) -> dict[str, Any]:
    """Return a config's rotary parameters, under either name."""
    # Read both, so that neither counts as unread.
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    return old or new or {}


def layered_ropes(config: Config) -> tuple[RopeSpec, RopeSpec]:
    """Return the rotary embeddings of full-attention layers and of sliding layers.

    Raises:
        UnsupportedModel: the decoder does not support one of them.
    """
    stated = config.get("rope_parameters") or {}
    if stated and not stated.keys() <= {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(
            "config.json: rope_parameters must name full_attention and sliding_attention"
        )
    # The top-level length only applies to parameters shared by all layers.
    config = config.replaced(original_max_position_embeddings=None)
    # Older configs only stretch full-attention layers.
    full = {**(stated.get("full_attention") or {}), **(config.get("rope_scaling") or {})}
    local = stated.get("sliding_attention") or {}
    return (
        _rope(config, full, config.get("rope_theta")),
        _rope(config, local, config.get("rope_local_base_freq")),
    )


def _rope(
    config: Config, parameters: dict[str, Any], theta: float, interleaved: bool = False
) -> RopeSpec:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = "longrope" if kind == "su" else kind
    if kind not in _ROPE_KINDS:
        raise UnsupportedModel(
            f"config.json: rope type {kind!r} is not supported; supported are: "
            + ", ".join(_ROPE_KINDS)
        )
    known = {key: parameters[key] for key in _ROPE_KEYS[kind] if parameters.get(key) is not None}
    original, share = (
        config.get("original_max_position_embeddings"),
        config.get("partial_rotary_factor"),
    )
    longest = integer(config, "max_position_embeddings")
    # The top-level length takes precedence, as in transformers.
    original = original or parameters.get("original_max_position_embeddings") or longest
    if "factor" not in known and kind in ("yarn", "longrope"):
        known["factor"] = longest / original
    if "factor" not in known and kind != "default":
        raise UnsupportedModel(f"config.json: rope type {kind!r} needs a factor")
    try:
        rope = msgspec.convert(
            {
                **known,
                "theta": parameters.get("rope_theta") or theta,
                "kind": kind,
                "interleaved": interleaved,
                "share": parameters.get("partial_rotary_factor") or share or 1.0,
                "original_max_position_embeddings": original,
            },
            RopeSpec,
            strict=False,
        )
    except msgspec.ValidationError as error:
        raise UnsupportedModel(f"config.json: rope parameters: {error}") from error
    if kind == "longrope":
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        needed = int(head_dim * rope.share) // 2
        if {len(rope.short_factor), len(rope.long_factor)} != {needed}:
            raise UnsupportedModel(
                f"config.json: longrope needs short_factor and long_factor of {needed} numbers"
            )
    return rope


_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor", "mscale_all_dim"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "mscale_all_dim"),
    "yarn": (
        "factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
        "truncate",
    ),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor", "mscale_all_dim"),
}  # fmt: skip
"""Fields of `RopeSpec` read by each type."""
