"""Locates the decoder's tensors in checkpoints, for all families: renamed or sliced from others."""

from collections.abc import Mapping

from msgspec.structs import replace

from engine.models.spec import ModelSpec
from engine.models.weights import Shape, Source, WeightMap, weight_map

LLAMA_NAMES: Mapping[str, str] = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "router": "gate",
}
"""Llama's (and most families') names of tensors that the decoder names differently."""
CORRECTED_NAMES = {**LLAMA_NAMES, "correction": "e_score_correction_bias"}
"""Names for models with corrected expert scores."""
MIXTRAL_NAMES = {
    **LLAMA_NAMES,
    "mlp": "block_sparse_moe",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}
"""Names of Mixtral and other models with its expert layout."""

TEXT_PREFIXES = ("model.", "language_model.model.", "model.language_model.")
"""Prefixes of the text model in vision-language checkpoints."""
NOT_TEXT = tuple(
    prefix + part
    for prefix in ("", "model.")
    for part in ("vision_tower.", "vision_model.", "multi_modal_projector.")
)
"""Prefixes of the vision encoder in such checkpoints."""


def llama_weights(spec: ModelSpec) -> WeightMap:
    """Return the locations of tensors in a checkpoint with Llama's names."""
    return named_weights(spec, LLAMA_NAMES)


def named_weights(spec: ModelSpec, names: Mapping[str, str]) -> WeightMap:
    """Return the locations of tensors with some name components replaced."""
    return weight_map(spec, lambda name, shape: Source(name=stored_name(name, names), shape=shape))


def stored_name(name: str, names: Mapping[str, str]) -> str:
    """Return a name with its dot-separated components replaced."""
    return ".".join(names.get(part, part) for part in name.split("."))


def fused_weights(
    spec: ModelSpec, names: Mapping[str, str], *, qkv: str | None, gate_up: str | None
) -> WeightMap:
    """Return the locations of tensors, some of which are stored fused.

    Args:
        names: as in `named_weights`.
        qkv, gate_up: names of the fused tensors, None if not fused.
    """
    parts: dict[str, tuple[str, int, int]] = {}
    """Keyed by the decoder's module name: fused name, first row, total rows of the fused tensor."""
    if qkv is not None:
        rows = spec.query_size + 2 * spec.kv_size
        parts["q_proj"] = (qkv, 0, rows)
        parts["k_proj"] = (qkv, spec.query_size, rows)
        parts["v_proj"] = (qkv, spec.query_size + spec.kv_size, rows)
    if gate_up is not None:
        parts["gate_proj"] = (gate_up, 0, 2 * spec.intermediate_size)
        parts["up_proj"] = (gate_up, spec.intermediate_size, 2 * spec.intermediate_size)

    def place(name: str, shape: Shape) -> Source:
        parent = name.split(".")[-2]
        if parent not in parts:
            return Source(name=stored_name(name, names), shape=shape)
        fused, first, rows = parts[parent]
        return Source(
            name=stored_name(name, {**names, parent: fused}),
            shape=(rows, *shape[1:]),
            first_row=first,
            num_rows=shape[0],
        )

    return weight_map(spec, place)


def stacked_experts(
    spec: ModelSpec,
    names: Mapping[str, str],
    *,
    gate_up: str,
    down: str,
    is_transposed: bool = False,
    alternate: bool = False,
) -> WeightMap:
    """Return the locations of tensors, with those of all experts stacked in two.

    Args:
        names: as in `named_weights`.
        gate_up, down: names of the stacked tensors within the layer's MLP; biases have the suffix
            `_bias`.
        is_transposed: whether inputs precede outputs in their shape.
        alternate: whether gate and up rows alternate, rather than gates preceding ups.
    """
    assert spec.moe is not None
    experts, inner, hidden = spec.moe.num_experts, spec.moe.intermediate_size, spec.hidden_size

    def place(name: str, shape: Shape) -> Source:
        if ".experts." not in name:
            return Source(name=stored_name(name, names), shape=shape)
        block, _, rest = name.partition(".experts.")
        number, part, kind = rest.split(".")
        is_down, is_bias = part == "down_proj", kind == "bias"
        outputs, inputs = (hidden, inner) if is_down else (2 * inner, hidden)
        weight = (inputs, outputs) if is_transposed else (outputs, inputs)
        source = Source(
            name=f"{stored_name(block, names)}.{down if is_down else gate_up}"
            + ("_bias" if is_bias else ""),
            shape=(experts, outputs) if is_bias else (experts, *weight),
            index=int(number),
            is_transposed=is_transposed and not is_bias,
        )
        if is_down:
            return source
        is_up = part == "up_proj"
        first, step = (int(is_up), 2) if alternate else (inner * is_up, 1)
        return replace(source, first_row=first, num_rows=inner, row_step=step)

    return weight_map(spec, place)
