"""The interface between the scheduler and an executor: one plan and one result per step.

A plan refers to *slots*: an index below `max_num_seqs` that a sequence keeps while it runs. The
executor keeps per-slot state (tokens, block table, sampling parameters) in persistent arrays, so a
plan contains only changes since the previous step and three integers per scheduled row. The
executor itself appends each sampled token to its slot's tokens: a plan for step n + 1 can be
created, and run, before the scheduler has seen the tokens of step n.
"""

import msgspec

from engine.shared.messages import EncoderInput, PoolingParams, SamplingParams, TokenLogprob

GRAMMAR_CONFLICT = (
    "the output cannot follow its grammar: the request rules out every token that it allows"
)
"""Reason given when a request's parameters contradict its grammar."""


DRAFT_PLACEHOLDER = -1
"""Placeholder in a plan for a proposed token that the executor's draft model or head chooses."""


class CannotDo(Exception):
    """An operator's request cannot be carried out, for the given reason; nothing has changed."""


class SlotImage(msgspec.Struct, frozen=True, array_like=True):
    """Placeholder tokens of an image in a sequence, which get its embeddings."""

    position: int
    num_tokens: int
    digest: bytes
    """Digest of the image."""
    height: int
    """Height in pixels."""
    width: int

    @property
    def end(self) -> int:
        """Position after the last of these tokens."""
        return self.position + self.num_tokens


class SlotStart(msgspec.Struct, frozen=True, array_like=True):
    """Start of a sequence in a slot, also after a preemption; replaces all state of the slot.

    `token_ids` are all tokens known so far; those from `num_prompt_tokens` on are output.
    """

    slot: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    pooling: PoolingParams | None = None
    adapter: int = -1
    """Slot of the sequence's adapter; -1 if none."""
    images: list[SlotImage] = []
    """Images of the prompt, by position."""


class SlotBlocks(msgspec.Struct, frozen=True, array_like=True):
    """KV blocks appended to a block table of a slot, starting at logical block `first`."""

    slot: int
    first: int
    block_ids: list[int]
    group: int = 0
    """Layer group of the blocks; each group has its own table."""


class BatchPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step: the rows to compute, decodes (rows of one token) first.

    Row i computes positions `starts[i]` to `starts[i] + counts[i] - 1` of `slots[i]`. If
    `samples[i]`, the token at position `starts[i] + counts[i]` is sampled from the row's last
    logits. An empty plan is a dummy step.

    A decode can also carry *proposed* tokens after its newest one: `proposed[i]` belongs to row i,
    which then has `counts[i] == 1 + len(proposed[i])`. They are computed as if they were part of
    the sequence, and a token is sampled after each. The executor keeps these samples up to and
    including the first that differs from the proposed token at its position. An executor with a
    draft model or head gets `DRAFT_PLACEHOLDER` instead of tokens, and chooses them.

    `adapters` are the versions to load into adapter slots, by slot, before anything else.

    An executor with an image encoder caches each image's embeddings by digest until a plan names it
    in `evicted_images`. Images in `encoded` are encoded after those evictions and before the rows,
    which use only cached images.
    """

    step: int
    starting: list[SlotStart]
    blocks: list[SlotBlocks]
    slots: list[int]
    starts: list[int]
    counts: list[int]
    samples: list[bool]
    proposed: dict[int, list[int]] = {}
    adapters: dict[int, str] = {}
    encoded: list[EncoderInput] = []
    evicted_images: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        """Number of tokens computed in this step."""
        return sum(self.counts)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens computed, excluding single-token decodes."""
        return sum(
            count
            for count, sample in zip(self.counts, self.samples, strict=True)
            if count > 1 or not sample
        )


class BatchResult(msgspec.Struct, frozen=True, array_like=True):
    """Results of a step.

    `token_ids` has the tokens of each row with `samples`, in row order: one, plus `accepted[i]` for
    a row with proposed tokens (all of which are in `accepted`). `logprobs` is parallel to it (None
    for requests without logprobs, or entirely if there are none). `prompt_logprobs[i]` belongs to
    row i: one entry for each prompt token at positions `starts[i] + 1` to `starts[i] + counts[i]`
    that is still part of the prompt.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprob | None] | None = None
    prompt_logprobs: dict[int, list[TokenLogprob]] = {}
    accepted: dict[int, int] = {}
    grammar_ends: dict[int, str | None] = {}
    """By slot: the last token completes the output by its grammar (None), or the output cannot
    continue for the given reason."""
    grammar_stalls: dict[int, str | None] = {}
    """By slot: its tokens are void, since the grammar failed for the given reason; recompiled
    without shared state, it can continue. None: the mask was late."""
    mask_us: dict[int, int] = {}
    """By slot: time in microseconds for its masks; only if long."""
    pooled: dict[int, bytes] = {}
    """By row: vector of a pooling sequence, as float32."""
    mask_wait_us: int = 0
    """Microseconds that the step waited for masks."""
