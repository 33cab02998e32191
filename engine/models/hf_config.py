"""What a Hugging Face checkpoint's `config.json` says about the model, as one frozen spec.

Both spellings in use are read: `rope_theta`, `rope_scaling` and `torch_dtype` (transformers 4)
and `rope_parameters` and `dtype` (transformers 5).
"""

from pathlib import Path
from typing import Any, Literal, cast, get_args

import msgspec

Architecture = Literal[
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
]
RopeKind = Literal["default", "linear", "llama3", "yarn"]
DtypeName = Literal["bfloat16", "float16", "float32"]

SUPPORTED_ARCHITECTURES: tuple[str, ...] = get_args(Architecture)
_ROPE_KINDS: tuple[str, ...] = get_args(RopeKind)
_DTYPES: tuple[str, ...] = get_args(DtypeName)


class UnsupportedModel(ValueError):
    """The checkpoint asks for something that this engine does not implement."""


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding: the base and, if stretched, by which scheme and how far."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class MoeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The sparse layers of a mixture-of-experts model."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Inner width of one expert."""
    normalize_weights: bool
    """Whether the weights of the chosen experts are scaled to sum to one."""
    layers: tuple[bool, ...]
    """Per layer: sparse (True) or a plain MLP."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the decoder has to know; sizes in elements."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    """Per layer: how many last positions a token attends to, itself included; None for all."""
    moe: MoeSpec | None
    eos_token_ids: tuple[int, ...]
    dtype: DtypeName | None
    """The checkpoint's own type; None when the config does not say."""

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (and of all value heads)."""
        return self.num_kv_heads * self.head_dim

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer's MLP is a mixture of experts."""
        return self.moe is not None and self.moe.layers[layer]


def read_spec(directory: Path) -> ModelSpec:
    """Read `config.json` and, if there, `generation_config.json` of a model directory.

    Raises:
        UnsupportedModel: naming the setting that cannot be honoured, or that is missing.
    """
    config = _read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    return parse_spec(config, _read_json(generation) if generation.is_file() else {})


def parse_spec(config: dict[str, Any], generation: dict[str, Any]) -> ModelSpec:
    """Make a spec from the decoded JSON files.

    Raises:
        UnsupportedModel: naming the setting that cannot be honoured, or that is missing.
    """
    architecture = _architecture(config)
    _refuse_unsupported(config)
    heads = _integer(config, "num_attention_heads")
    hidden = _integer(config, "hidden_size")
    layers = _integer(config, "num_hidden_layers")
    bias = bool(config.get("attention_bias") or False)
    qwen2 = architecture == "Qwen2ForCausalLM"
    rope = _rope(config)
    moe = _moe(config, architecture, layers)
    dense_layers = moe is None or not all(moe.layers)
    return ModelSpec(
        architecture=architecture,
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(config, "intermediate_size") if dense_layers else 0,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        rms_norm_eps=config.get("rms_norm_eps") or _default_eps(architecture),
        rope=rope,
        max_position_embeddings=_max_position(config, rope),
        tie_word_embeddings=bool(config.get("tie_word_embeddings") or False),
        qkv_bias=bias or qwen2,
        output_bias=bias and not qwen2,
        mlp_bias=bool(config.get("mlp_bias") or False),
        qk_norm=architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        windows=_windows(config, architecture, layers),
        moe=moe,
        eos_token_ids=_eos_token_ids(config, generation),
        dtype=_dtype(config),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError as error:
        raise UnsupportedModel(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path} does not hold a JSON object")
    return content


def _integer(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"config.json: {key} must be a positive integer, found {value!r}")
    return value


def _architecture(config: dict[str, Any]) -> Architecture:
    named = config.get("architectures") or []
    for name in named:
        if name in SUPPORTED_ARCHITECTURES:
            return cast("Architecture", name)
    found = ", ".join(named) or f"none (model_type {config.get('model_type')!r})"
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    raise UnsupportedModel(f"architecture {found} is not supported; supported are: {supported}")


def _refuse_unsupported(config: dict[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        raise UnsupportedModel(
            f"the checkpoint is quantized ({quantization.get('quant_method')}); "
            "use the original bfloat16, float16 or float32 weights"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(
            f"config.json: hidden_act {activation!r} is not supported, only silu"
        )


def _default_eps(architecture: Architecture) -> float:
    return 1e-5 if architecture == "MixtralForCausalLM" else 1e-6


def _rope(config: dict[str, Any]) -> RopeSpec:
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in _ROPE_KINDS:
        raise UnsupportedModel(
            f"config.json: rope type {kind!r} is not supported; supported are: "
            + ", ".join(_ROPE_KINDS)
        )
    partial = given.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise UnsupportedModel(f"config.json: partial_rotary_factor {partial} is not supported")
    known = {field: given[field] for field in _ROPE_FIELDS if given.get(field) is not None}
    known["theta"] = given.get("rope_theta") or config.get("rope_theta") or 10000.0
    known["kind"] = kind
    known.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    try:
        return msgspec.convert(known, RopeSpec, strict=False)
    except msgspec.ValidationError as error:
        raise UnsupportedModel(f"config.json: rope parameters: {error}") from error


_ROPE_FIELDS = tuple(
    field for field in RopeSpec.__struct_fields__ if field not in ("theta", "kind")
)


def _max_position(config: dict[str, Any], rope: RopeSpec) -> int:
    """Yarn checkpoints state the length before stretching; the others the final one."""
    stated = _integer(config, "max_position_embeddings")
    if rope.kind != "yarn":
        return stated
    return max(stated, int(rope.original_max_position_embeddings * rope.factor))


def _windows(
    config: dict[str, Any], architecture: Architecture, layers: int
) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    qwen = architecture.startswith("Qwen")
    if window is None or (qwen and not config.get("use_sliding_window")):
        return (None,) * layers
    kinds = config.get("layer_types")
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        first = config.get("max_window_layers", layers)
        return tuple(window if layer >= first else None for layer in range(layers))
    return (window,) * layers


def _moe(config: dict[str, Any], architecture: Architecture, layers: int) -> MoeSpec | None:
    if architecture == "MixtralForCausalLM":
        return MoeSpec(
            num_experts=_integer(config, "num_local_experts"),
            experts_per_token=_integer(config, "num_experts_per_tok"),
            intermediate_size=_integer(config, "intermediate_size"),
            normalize_weights=True,
            layers=(True,) * layers,
        )
    if architecture != "Qwen3MoeForCausalLM":
        return None
    step = config.get("decoder_sparse_step") or 1
    dense = set(config.get("mlp_only_layers") or ())
    experts = "num_experts" if "num_experts" in config else "num_local_experts"
    return MoeSpec(
        num_experts=_integer(config, experts),
        experts_per_token=_integer(config, "num_experts_per_tok"),
        intermediate_size=_integer(config, "moe_intermediate_size"),
        normalize_weights=bool(config.get("norm_topk_prob") or False),
        layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
    )


def _eos_token_ids(config: dict[str, Any], generation: dict[str, Any]) -> tuple[int, ...]:
    for source in (generation, config):
        eos = source.get("eos_token_id")
        if eos is not None:
            return (eos,) if isinstance(eos, int) else tuple(eos)
    return ()


def _dtype(config: dict[str, Any]) -> DtypeName | None:
    name = config.get("dtype") or config.get("torch_dtype")
    if name is None:
        return None
    if name not in _DTYPES:
        raise UnsupportedModel(f"config.json: dtype {name!r} is not supported; use --dtype")
    return cast("DtypeName", name)
