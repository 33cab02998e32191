"""From the rows of a step to the tensors that a decoder takes."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from engine.models.adapters import AdapterRows
from engine.models.attention.rows import AttentionRows
from engine.models.decoder import Decoder
from engine.models.device_copies import to_device
from engine.models.step import (
    NO_TAPS,
    FinalTokens,
    GroupTokens,
    ImageTokens,
    StepTokens,
    Taps,
    WholeImages,
)
from engine.runner.inputs import BatchRows
from engine.runner.slots import SlotTable
from engine.runner.verification import Draws, draw_rows


def step_tokens(
    model: Decoder,
    table: SlotTable,
    rows: BatchRows,
    shape: AttentionRows,
    *,
    draws: Draws | None,
    adapters: AdapterRows | None = None,
    taps: Taps = NO_TAPS,
    images: ImageTokens | None = None,
) -> StepTokens:
    """Return what the model computes.

    Args:
        model: says how to attend, and where the tensors have to be.
        table: the slots of the rows.
        rows: of the step.
        shape: the same for attention.
        draws: the only states that are needed; None for those of all tokens.
        adapters: of each token.
        taps: what states between layers are given to.
        images: the tokens that stand for some.
    """
    device, final = model.device, None
    if draws is not None:
        ends = draw_rows(draws, table).of_group(model.last_group)
        plan = model.attention.plan(ends, model.last_window) if len(draws.tokens) else None
        final = FinalTokens(to_device(draws.tokens, device), plan)
    return StepTokens(
        token_ids=to_device(rows.token_ids, device),
        positions=to_device(rows.turns, device),
        slots=to_device(rows.cache_slots, device),
        rows=shape,
        plans=plans_of(model, shape, 0),
        final=final,
        adapters=adapters,
        others=other_groups(model, shape, [to_device(each, device) for each in rows.other_slots]),
        taps=taps,
        images=images,
    )


def plans_of(model: Decoder, shape: AttentionRows, group: int) -> dict[int | None, Any]:
    """Return how the layers of a group attend, by their windows."""
    rows = shape.of_group(group)
    return {window: model.attention.plan(rows, window) for window in model.windows[group]}


def whole_images(
    model: Decoder, rows: AttentionRows, queries: Tensor, computed: Tensor
) -> WholeImages:
    """Return how tokens of images, a row for each image, attend in the layers that are here."""
    attention = model.image_attention
    assert attention is not None, "tokens of the model's images attend as others do"
    plans = tuple(
        {window: attention.plan_whole(rows.of_group(group), window) for window in windows}
        for group, windows in enumerate(model.windows)
    )
    return WholeImages(queries, computed, rows, plans)


def other_groups(
    model: Decoder, shape: AttentionRows, slots: Sequence[Tensor]
) -> tuple[GroupTokens, ...]:
    """Return what differs for the groups of layers after the first, whose cache slots are given."""
    return tuple(
        GroupTokens(each, plans_of(model, shape, group)) for group, each in enumerate(slots, 1)
    )
