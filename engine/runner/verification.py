"""Rows with proposed tokens: which logits are drawn from, and which draws are kept."""

import msgspec
import numpy as np
import numpy.typing as npt

from engine.batch.batch import BatchPlan, BatchResult
from engine.grammar.masks import Ends, GrammarTable
from engine.models.attention.rows import AttentionRows
from engine.runner.inputs import BatchRows
from engine.runner.sampler import Sampled
from engine.runner.slots import SlotTable
from engine.shared.messages import TokenLogprob

IntArray = npt.NDArray[np.int64]


class Draws(msgspec.Struct, frozen=True):
    """The tokens of a step that another token is drawn after, in order of rows."""

    tokens: IntArray
    """Index among the tokens of the step."""
    slots: IntArray
    positions: IntArray
    """Position of the token to be drawn."""
    first: dict[int, int]
    """For each row with proposed tokens the index of its first draw."""


def write_proposed(plan: BatchPlan, table: SlotTable) -> None:
    """Put proposed tokens where their sequence will have them if they are accepted.

    So all that depends on a sequence's tokens (input, penalties) is right for every draw that is
    kept. Whatever stays there of others is overwritten before it counts.
    """
    for row, proposed in plan.proposed.items():
        first = plan.starts[row] + 1
        table.token_ids[plan.slots[row], first : first + len(proposed)] = proposed


def draws_of(plan: BatchPlan, rows: BatchRows) -> Draws:
    """Return one draw for each row that samples, and one more for each proposed token."""
    samples = rows.samples
    if not any(plan.proposed.values()):
        last, positions = rows.last_tokens[samples], rows.next_positions[samples]
        return Draws(last, rows.slots[samples], positions, {})
    counts = np.array([1 + len(plan.proposed.get(row, ())) for row in samples.tolist()])
    ends = np.cumsum(counts)
    repeated = np.repeat(samples, counts)
    # Counted back from the row's last token and the position after it.
    back = np.repeat(ends, counts) - np.arange(ends[-1]) - 1
    return Draws(
        tokens=rows.last_tokens[repeated] - back,
        slots=rows.slots[repeated],
        positions=rows.next_positions[repeated] - back,
        first={
            row: first
            for row, first in zip(samples.tolist(), (ends - counts).tolist(), strict=True)
            if row in plan.proposed
        },
    )


def draw_rows(draws: Draws, table: SlotTable) -> AttentionRows:
    """Return each token that is drawn after as a row of its own."""
    width = -(-int(draws.positions.max(initial=1)) // table.block_size)
    return AttentionRows(
        starts=draws.positions - 1,
        counts=np.ones_like(draws.positions),
        first_token=np.arange(len(draws.positions)),
        block_tables=table.block_tables[draws.slots, :width],
        block_size=table.block_size,
        other_tables=tuple(tables[draws.slots, :width] for tables in table.other_tables),
    )


def verified(
    plan: BatchPlan,
    draws: Draws,
    sampled: Sampled,
    prompt_logprobs: dict[int, list[TokenLogprob]],
    grammars: GrammarTable | None,
) -> BatchResult:
    """Return the result of a step with only those draws that are kept.

    They are as long as every proposed token before them was drawn as well, and no grammar ended.
    """
    token_ids, logprobs = sampled.token_ids, sampled.logprobs
    kept = np.ones(len(token_ids), np.bool_)
    accepted: dict[int, int] = {}
    for row, first in draws.first.items():
        proposed = plan.proposed[row]
        drawn = token_ids[first : first + len(proposed)]
        wrong = np.flatnonzero(drawn != proposed)
        accepted[row] = int(wrong[0]) if len(wrong) else len(proposed)
        kept[first + accepted[row] + 1 : first + len(proposed) + 1] = False
    ends = Ends({}, {}, {})
    if grammars is not None:
        ends = grammars.advance(draws.slots[kept].tolist(), token_ids[kept].tolist())
    for row, first in draws.first.items():
        surplus = ends.surplus.get(plan.slots[row], 0)
        last = first + accepted[row]
        kept[last + 1 - surplus : last + 1] = False
        accepted[row] -= surplus
    if logprobs is not None:
        logprobs = [logprobs[index] for index in np.flatnonzero(kept).tolist()]
    return BatchResult(
        token_ids[kept].tolist(),
        logprobs,
        prompt_logprobs,
        accepted,
        ends.reasons,
        ends.stalls,
        mask_us={} if grammars is None else grammars.mask_us,
        mask_wait_us=0 if grammars is None else grammars.waited_us,
    )
