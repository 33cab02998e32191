"""Rotary position embeddings: inverse frequencies of every supported scheme, and the rotation."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.models.module import Module
from engine.models.spec import RopeSpec, TemperatureSpec
from engine.models.weights import rotated_dims

Rotation = tuple[Tensor, Tensor]
"""Cosines and signed sines for `engine.kernels.reference.rotate`, each [tokens, 1, head_dim]."""


class Rotary(Module):
    """Lookup table of the rotation angles of all positions."""

    table: Tensor

    def __init__(self, table: Tensor, sections: Sequence[int] = ()) -> None:
        """Initialize with a table from `rotary_table`; `sections` as in `rotation`."""
        super().__init__()
        self.register_buffer("table", table, persistent=False)
        self.sections = sections

    def forward(self, positions: Tensor) -> Rotation:
        """Return the rotation factors of these positions."""
        return rotation(self.table, positions, self.sections)


def rotary_table(
    rope: RopeSpec, head_dim: int, length: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return cosines and sines of the angles of all positions below `length`.

    Head dimensions are ordered as in `engine.models.weights.rotated_order`.

    Returns:
        [length, 2, head_dim / 2] in `dtype`. Angles are computed in float32, as in the reference
        implementations.
    """
    rotated = rotated_dims(rope, head_dim)
    # Not rounded up: the exponents are fractions of this.
    frequencies = _inverse_frequencies(rope, int(head_dim * rope.share), length)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    table = torch.stack((angles.cos(), angles.sin()), dim=1) * _attention_scale(rope)
    # Identity rotation for the remaining dimensions.
    rest = table.new_tensor((1.0, 0.0)).view(1, 2, 1).expand(length, 2, (head_dim - rotated) // 2)
    return torch.cat((table, rest), dim=2).to(dtype).to(device)


def rotation(table: Tensor, positions: Tensor, sections: Sequence[int] = ()) -> Rotation:
    """Return the factors of `rotate` for these positions, each [tokens, 1, head_dim].

    Args:
        positions: [tokens], or [parts, tokens] if sections of a head have separate positions.
        sections: number of frequencies per part; only used with [parts, tokens].
    """
    if positions.dim() == 1:
        found = table.index_select(0, positions)
    else:
        parts = zip(torch.split(table, list(sections), dim=2), positions, strict=True)
        found = torch.cat([part.index_select(0, places) for part, places in parts], dim=2)
    cos, sin = found.unsqueeze(2).unbind(1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def temperatures(spec: TemperatureSpec, length: int, device: torch.device) -> Tensor:
    """Return the query multipliers of all positions below `length`, in float32."""
    positions = torch.arange(spec.offset, length + spec.offset, dtype=torch.float32)
    table = torch.log1p(torch.floor(positions / spec.step)) * spec.scale + 1
    return table.to(device)


def _inverse_frequencies(rope: RopeSpec, rotated: int, length: int) -> Tensor:
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "longrope":
        # The same divisors for all positions, so cached keys stay valid as a sequence grows
        # (LongRoPE, arXiv 2402.13753).
        is_long = length > rope.original_max_position_embeddings
        return plain / torch.tensor(rope.long_factor if is_long else rope.short_factor)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, rotated)
    return plain


def _llama3(rope: RopeSpec, plain: Tensor) -> Tensor:
    """Scale long wavelengths by the factor, keep short ones, blend between (Llama 3.1)."""
    turns = rope.original_max_position_embeddings * plain / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = ((turns - rope.low_freq_factor) / span).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / rope.factor


def _yarn(rope: RopeSpec, plain: Tensor, head_dim: int) -> Tensor:
    """Interpolate by the number of turns over the original context (YaRN, arXiv 2309.00071)."""

    def dimension_of(turns: float) -> float:
        length = rope.original_max_position_embeddings
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _attention_scale(rope: RopeSpec) -> float:
    """Return the temperature that YaRN and LongRoPE apply to queries and keys via the rotation."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope":
        if rope.factor <= 1:
            return 1.0
        return math.sqrt(
            1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings)
        )

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
