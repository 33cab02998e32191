"""The tensors of a decoder, and their locations in a checkpoint.

The decoder's names are those of Llama checkpoints, except for norms and routers, whose names differ
in every family.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from engine.models.spec import LatentSpec, ModelSpec, RopeSpec

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
Layout = dict[str, Shape]


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of a checkpoint, and the part of it that is a tensor of the decoder."""

    name: str
    shape: Shape
    """Shape of the whole stored tensor."""
    index: int | None = None
    """Index along the first axis of a stacked tensor."""
    first_row: int = 0
    num_rows: int | None = None
    """Number of selected rows; None for all from `first_row`."""
    row_step: int = 1
    """Distance between selected rows."""
    is_transposed: bool = False
    """Whether inputs are the first stored axis and rows the second."""
    head_order: tuple[int, ...] | None = None
    """Permutation of each head's rows."""

    def read(self, stored: "Tensor") -> "Tensor":
        """Return the part; a view where possible."""
        part = stored if self.index is None else stored[self.index]
        part = self.rows(part.T if self.is_transposed else part)
        if self.head_order is None:
            return part
        axis = part.dim() - 1 if self.is_norm else 0
        width = len(self.head_order)
        heads = part.reshape(*part.shape[:axis], -1, width, *part.shape[axis + 1 :])
        order = list(self.head_order)
        ordered = heads[:, order] if axis == 0 else heads[:, :, order]
        return ordered.reshape(part.shape)

    def rows(self, part: "Tensor") -> "Tensor":
        """Return the selected rows, in stored order."""
        if self.num_rows is None:
            return part
        end = self.first_row + self.num_rows * self.row_step
        return part[self.first_row : end : self.row_step]

    @property
    def is_norm(self) -> bool:
        """Whether heads are along the last axis instead of the first."""
        return self.name.endswith("norm.weight")


WeightMap = dict[str, Source]
"""Keyed by the decoder's tensor names."""


def decoder_tensors(spec: ModelSpec) -> Layout:
    """Return the name and shape of every tensor of this model's decoder."""
    hidden = spec.hidden_size
    layout: Layout = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if spec.num_outputs:
        layout["score.weight"] = (spec.num_outputs, hidden)
    elif spec.num_outputs is None and not spec.tie_word_embeddings:
        layout["lm_head.weight"] = (spec.vocab_size, hidden)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        layout.update({f"{prefix}{norm}.weight": (hidden,) for norm in layer_norms(spec)})
        layout.update(_attention_tensors(spec, prefix + "self_attn."))
        if spec.is_sparse(layer):
            layout.update(_expert_tensors(spec, prefix + "mlp."))
        else:
            layout.update(_mlp_tensors(spec, prefix + "mlp."))
    return layout


def layer_norms(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of a layer's norms."""
    before, after = ("attention_norm", "mlp_norm"), ("attention_output_norm", "mlp_output_norm")
    placed = {"before": before, "after": after, "around": before + after, "parallel": before[:1]}
    return placed[spec.block]


def _attention_tensors(spec: ModelSpec, prefix: str) -> Iterator[tuple[str, Shape]]:
    if spec.latent is not None:
        yield from _latent_tensors(spec, spec.latent, prefix)
        return
    sizes = {"q_proj": spec.query_size, "k_proj": spec.kv_size, "v_proj": spec.kv_size}
    for name, size in sizes.items():
        yield f"{prefix}{name}.weight", (size, spec.hidden_size)
        if spec.qkv_bias:
            yield f"{prefix}{name}.bias", (size,)
    yield prefix + "o_proj.weight", (spec.hidden_size, spec.query_size)
    if spec.output_bias:
        yield prefix + "o_proj.bias", (spec.hidden_size,)
    if spec.attention_sinks:
        yield prefix + "sinks", (spec.num_heads,)
    for name, heads in (("q_norm", spec.num_heads), ("k_norm", spec.num_kv_heads)):
        if spec.qk_norm == "head":
            yield f"{prefix}{name}.weight", (spec.head_dim,)
        elif spec.qk_norm == "each_head":
            yield f"{prefix}{name}.weight", (heads, spec.head_dim)
        elif spec.qk_norm == "width":
            yield f"{prefix}{name}.weight", (heads * spec.head_dim,)


def _latent_tensors(
    spec: ModelSpec, latent: LatentSpec, prefix: str
) -> Iterator[tuple[str, Shape]]:
    heads, hidden = spec.num_heads, spec.hidden_size
    queries = heads * (latent.plain_size + latent.rotated_size)
    if latent.query_rank is None:
        yield prefix + "q_proj.weight", (queries, hidden)
    else:
        yield prefix + "q_a_proj.weight", (latent.query_rank, hidden)
        yield prefix + "q_a_norm.weight", (latent.query_rank,)
        yield prefix + "q_b_proj.weight", (queries, latent.query_rank)
    latent_width = latent.rank + latent.rotated_size
    yield prefix + "kv_a_proj.weight", (latent_width, hidden)
    yield prefix + "kv_a_norm.weight", (latent.rank,)
    kv_width = heads * (latent.plain_size + latent.value_size)
    yield prefix + "kv_b_proj.weight", (kv_width, latent.rank)
    yield prefix + "o_proj.weight", (hidden, heads * latent.value_size)
    if spec.qkv_bias:
        assert latent.query_rank is not None
        yield prefix + "q_a_proj.bias", (latent.query_rank,)
        yield prefix + "kv_a_proj.bias", (latent_width,)
    if spec.output_bias:
        yield prefix + "o_proj.bias", (hidden,)


def _mlp_tensors(spec: ModelSpec, prefix: str) -> Iterator[tuple[str, Shape]]:
    for name, shape in _gated_shapes(prefix, spec.hidden_size, spec.intermediate_size).items():
        yield f"{name}.weight", shape
        if spec.mlp_bias:
            yield f"{name}.bias", shape[:1]


def _gated_shapes(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, int]]:
    """Return the shapes of the products of a gated MLP."""
    wide, back = (inner, hidden), (hidden, inner)
    return {prefix + "gate_proj": wide, prefix + "up_proj": wide, prefix + "down_proj": back}


def _expert_tensors(spec: ModelSpec, prefix: str) -> Iterator[tuple[str, Shape]]:
    assert spec.moe is not None
    hidden, moe = spec.hidden_size, spec.moe
    shapes = {"router": (moe.num_experts, hidden)}
    for number in range(moe.num_experts):
        shapes |= _gated_shapes(f"experts.{number}.", hidden, moe.intermediate_size)
    if moe.shared_size:
        for name, shape in _gated_shapes("shared_experts.", hidden, moe.shared_size).items():
            yield f"{prefix}{name}.weight", shape
    if moe.has_correction:
        yield prefix + "router.correction", (moe.num_experts,)
    for name, shape in shapes.items():
        yield f"{prefix}{name}.weight", shape
        if moe.bias:
            yield f"{prefix}{name}.bias", shape[:1]


def stored_tensors(weights: WeightMap) -> Layout:
    """Return the name and shape of every tensor that the checkpoint must contain."""
    return {source.name: source.shape for source in weights.values()}


def weight_map(spec: ModelSpec, place: Callable[[str, Shape], Source]) -> WeightMap:
    """Locate all tensors of a decoder, ordering queries and keys for its rotation.

    Args:
        place: returns the source of a tensor by the decoder's name and the shape.
    """
    found = {name: place(name, shape) for name, shape in decoder_tensors(spec).items()}
    orders = _head_orders(spec)
    return {
        name: msgspec.structs.replace(source, head_order=orders.get(name.split(".")[-2]))
        for name, source in found.items()
    }


def _head_orders(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the order of each head's rows, by module name, where it differs."""
    ropes, latent = spec.distinct_ropes, spec.latent
    order = rotated_order(ropes[0], spec.rotary_size) if ropes else None
    if order is None:
        return {}
    if latent is None:
        return dict.fromkeys(("q_proj", "k_proj", "q_norm", "k_norm"), order)
    queries, kept = (
        (*range(before), *(before + row for row in order))
        for before in (latent.plain_size, latent.rank)
    )
    return {"q_proj": queries, "q_b_proj": queries, "kv_a_proj": kept}


def rotated_order(rope: RopeSpec, head_dim: int) -> tuple[int, ...] | None:
    """Return the order of a head's dimensions in which i is rotated with i + head_dim / 2.

    Scores are sums over dimensions, so any order shared by queries and keys is equivalent. Each
    half ends with the dimensions that are not rotated. None if no reordering is needed.
    """
    if not rope.interleaved and rope.share == 1.0:
        return None
    rotated = rotated_dims(rope, head_dim)
    pairs = range(rotated // 2)
    if rope.interleaved:
        first, second = [2 * i for i in pairs], [2 * i + 1 for i in pairs]
    else:
        first, second = list(pairs), [i + rotated // 2 for i in pairs]
    rest = list(range(rotated, head_dim))
    middle = len(rest) // 2
    return (*first, *rest[:middle], *second, *rest[middle:])


def rotated_dims(rope: RopeSpec, head_dim: int) -> int:
    """Return the number of rotated dimensions per head; an odd number is rounded up."""
    return -(-int(head_dim * rope.share) // 2) * 2
