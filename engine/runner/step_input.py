"""From the rows of a step to the tensors that a decoder takes."""

from engine.models.adapters import AdapterRows
from engine.models.attention.plan import AttentionRows
from engine.models.attention.varlen import to_device
from engine.models.decoder import Decoder, FinalTokens, StepTokens
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
) -> StepTokens:
    """Return what the model computes.

    Args:
        model: says how to attend, and where the tensors have to be.
        table: the slots of the rows.
        rows: of the step.
        shape: the same for attention.
        draws: the only states that are needed; None for those of all tokens.
        adapters: of each token.
    """
    device, final = model.device, None
    if draws is not None:
        ends = draw_rows(draws, table)
        plan = model.attention.plan(ends, model.last_window) if len(draws.tokens) else None
        final = FinalTokens(to_device(draws.tokens, device), plan)
    return StepTokens(
        token_ids=to_device(rows.token_ids, device),
        positions=to_device(rows.positions, device),
        slots=to_device(rows.cache_slots, device),
        rows=shape,
        plans={window: model.attention.plan(shape, window) for window in model.windows},
        final=final,
        adapters=adapters,
    )
