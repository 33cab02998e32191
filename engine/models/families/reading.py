"""Reads config.json, for all families: keys that most of them share.

Both spellings in use are read: `rope_theta` and `rope_scaling` (transformers 4) and
`rope_parameters` (transformers 5).
"""

from typing import Any, Literal, get_args

import msgspec

from engine.models.families.family import Config
from engine.models.spec import ModelSpec, MoeSpec, NormSpec, RopeKind, RopeSpec, UnsupportedModel

Activation = Literal["silu", "gelu_tanh"]

_ROPE_KINDS: tuple[str, ...] = get_args(RopeKind)
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def llama_spec(
    config: Config, *, eps: float = 1e-6, tied: bool = False, rope: RopeSpec | None = None
) -> ModelSpec:
    """Return the spec of a model that differs in nothing from Llama.

    Args:
        eps, tied: defaults where the config says nothing.
        rope: of all layers, if it is not to be read as Llama's.

    Raises:
        UnsupportedModel: naming the setting that cannot be honoured, or that is missing.
    """
    heads, hidden = integer(config, "num_attention_heads"), integer(config, "hidden_size")
    layers = integer(config, "num_hidden_layers")
    bias = bool(config.get("attention_bias") or False)
    rope = rope or _whole_rope(config)
    tie = config.get("tie_word_embeddings")
    return ModelSpec(
        architecture=config["architectures"][0],
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=integer(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        norm=NormSpec(eps=config.get("rms_norm_eps") or eps),
        ropes=(rope,) * layers,
        max_position_embeddings=_max_position(config, rope),
        tie_word_embeddings=tied if tie is None else bool(tie),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(config.get("mlp_bias") or False),
        activation=read_activation(config, "hidden_act"),
        windows=(None,) * layers,
    )


def integer(config: Config, key: str) -> int:
    """Return a positive integer.

    Raises:
        UnsupportedModel: it is missing, or something else.
    """
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"config.json: {key} must be a positive integer, found {value!r}")
    return value


def number(config: Config, key: str, default: float) -> float:
    """Return a number.

    Raises:
        UnsupportedModel: it is something else.
    """
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnsupportedModel(f"config.json: {key} must be a number, found {value!r}")
    return float(value)


def cap(config: Config, key: str, default: float | None) -> float | None:
    """Return what values are capped at, None if they are not.

    Raises:
        UnsupportedModel: it is no number.
    """
    if config.get(key, default) is None:
        return None
    return number(config, key, 0.0) if key in config else default


def read_activation(config: Config, key: str, default: str = "silu") -> Activation:
    """Return the activation of the gates.

    Raises:
        UnsupportedModel: it is none of those that the decoder has.
    """
    name = config.get(key) or default
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"config.json: {key} {name!r} is not supported, only {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def grouped_experts(config: Config, best_of_group: int = 2) -> MoeSpec:
    """Return experts behind some dense layers, chosen by corrected scores in groups of them.

    Args:
        best_of_group: see `MoeSpec`.

    Raises:
        UnsupportedModel: a number is missing, or the groups do not suit the experts.
    """
    layers, size = integer(config, "num_hidden_layers"), integer(config, "moe_intermediate_size")
    dense = number(config, "first_k_dense_replace", 0)
    experts = "n_routed_experts" if "n_routed_experts" in config else "num_local_experts"
    moe = MoeSpec(
        num_experts=integer(config, experts),
        experts_per_token=integer(config, "num_experts_per_tok"),
        intermediate_size=size,
        normalize_weights=bool(config.get("norm_topk_prob", True)),
        layers=tuple(layer >= dense for layer in range(layers)),
        scoring="sigmoid",
        has_correction=True,
        in_float32=True,
        num_groups=integer({"n_group": 1, **config}, "n_group"),
        groups_per_token=integer({"topk_group": 1, **config}, "topk_group"),
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
            f"suit {moe.num_experts} experts, of which a token has {moe.experts_per_token}"
        )
    return moe


def layer_windows(config: Config, pattern: int | None = None) -> tuple[int | None, ...]:
    """Return each layer's window, by `layer_types`.

    Args:
        pattern: without these, every layer but each so-many-th slides; None if all do.

    Raises:
        UnsupportedModel: the types are unknown, or not one a layer.
    """
    window, layers = config.get("sliding_window"), integer(config, "num_hidden_layers")
    if window is None:
        return (None,) * layers
    kinds = config.get("layer_types")
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


def read_rope(
    config: Config,
    *,
    theta: float = 10000.0,
    share: float = 1.0,
    interleaved: bool = False,
    layer_type: str | None = None,
) -> RopeSpec:
    """Return the rotary embedding.

    Args:
        theta, share: what holds where the config has no word on it.
        interleaved: see `RopeSpec`.
        layer_type: whose parameters are meant, where types of layers have their own.

    Raises:
        UnsupportedModel: it is none of those that the decoder has.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if layer_type is not None:
        given = given.get(layer_type, given)
    kind = given.get("rope_type") or given.get("type") or "default"
    kind = "longrope" if kind == "su" else kind
    if kind not in _ROPE_KINDS:
        raise UnsupportedModel(
            f"config.json: rope type {kind!r} is not supported; supported are: "
            + ", ".join(_ROPE_KINDS)
        )
    known = {field: given[field] for field in _ROPE_FIELDS if given.get(field) is not None}
    known["theta"] = given.get("rope_theta") or config.get("rope_theta") or theta
    known["kind"] = kind
    known["interleaved"] = interleaved
    known["share"] = (
        given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or share
    )
    longest = config.get("max_position_embeddings")
    original = config.get("original_max_position_embeddings") or longest
    known.setdefault("original_max_position_embeddings", original)
    try:
        rope = msgspec.convert(known, RopeSpec, strict=False)
    except msgspec.ValidationError as error:
        raise UnsupportedModel(f"config.json: rope parameters: {error}") from error
    return _longrope(rope, config, given) if kind == "longrope" else rope


def layered_ropes(
    config: Config, *, theta: float, local_theta: float | None
) -> tuple[RopeSpec, RopeSpec]:
    """Return how layers that see everything rotate, and those that slide.

    Args:
        theta: what holds where the config has no word on it.
        local_theta: the same for layers that slide; None if it is that of the others.

    Raises:
        UnsupportedModel: it is none of those that the decoder has.
    """
    if "full_attention" in (config.get("rope_parameters") or {}):
        whole = read_rope(config, theta=theta, layer_type="full_attention")
        local = read_rope(config, theta=local_theta or theta, layer_type="sliding_attention")
        return whole, local
    whole = read_rope(config, theta=theta)
    base = number(config, "rope_local_base_freq", local_theta or whole.theta)
    # Only layers that see everything are stretched.
    return whole, RopeSpec(
        theta=base, original_max_position_embeddings=integer(config, "max_position_embeddings")
    )


def _whole_rope(config: Config) -> RopeSpec:
    rope = read_rope(config)
    if rope.share != 1.0:
        raise UnsupportedModel(f"config.json: partial_rotary_factor {rope.share} is not supported")
    return rope


_OWN_ROPE_FIELDS = ("theta", "kind", "interleaved", "share")
_ROPE_FIELDS = tuple(field for field in RopeSpec.__struct_fields__ if field not in _OWN_ROPE_FIELDS)


def _longrope(rope: RopeSpec, config: Config, given: dict[str, Any]) -> RopeSpec:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    needed = int(head_dim * rope.share) // 2
    for factors in (rope.short_factor, rope.long_factor):
        if len(factors) != needed:
            raise UnsupportedModel(
                f"config.json: longrope needs short_factor and long_factor of {needed} numbers"
            )
    if given.get("factor") is not None:
        return rope
    longest = integer(config, "max_position_embeddings")
    return msgspec.structs.replace(rope, factor=longest / rope.original_max_position_embeddings)


def _max_position(config: Config, rope: RopeSpec) -> int:
    """Yarn checkpoints state the length before stretching; the others the final one."""
    stated = integer(config, "max_position_embeddings")
    if rope.kind != "yarn":
        return stated
    return max(stated, int(rope.original_max_position_embeddings * rope.factor))
