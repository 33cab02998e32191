"""What travels between the scheduler and an executor: one plan and one result per step.

A plan speaks of *slots*: an index below `max_num_seqs` that a sequence keeps while it runs. The
executor holds per-slot state (tokens, block table, sampling parameters) in persistent arrays, so
a plan carries only what changed since the step before and three integers per scheduled row.
The executor itself appends each sampled token to its slot's tokens: a plan for step n + 1 can be
made, and run, before the scheduler has seen the tokens of step n.
"""

import msgspec

from engine.shared.messages import EncoderInput, PoolingParams, SamplingParams, TokenLogprob

RULED_OUT = "the output cannot follow its grammar: the request rules out every token that it allows"
"""The reason given for an output whose request contradicts itself."""


TO_BE_DRAFTED = -1
"""Stands in a plan for a proposed token that the executor's draft model or head chooses."""


class SlotImage(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a sequence that stand for an image: they have its embeddings."""

    position: int
    num_tokens: int
    digest: bytes
    """Names what was encoded."""
    height: int
    """Of its pixels, as the next."""
    width: int

    @property
    def end(self) -> int:
        """Position after the last of them."""
        return self.position + self.num_tokens


class SlotStart(msgspec.Struct, frozen=True, array_like=True):
    """A sequence takes (or, after a preemption, takes again) a slot; all state there is replaced.

    `token_ids` are all tokens known so far; those from `num_prompt_tokens` on count as output.
    """

    slot: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    pooling: PoolingParams | None = None
    adapter: int = -1
    """Slot of the adapter that the sequence is computed with; -1 for none."""
    images: list[SlotImage] = []
    """What its prompt shows, by position."""


class SlotBlocks(msgspec.Struct, frozen=True, array_like=True):
    """KV blocks appended to a block table of a slot, starting at logical block `first`."""

    slot: int
    first: int
    block_ids: list[int]
    group: int = 0
    """Of the layers whose keys and values they are for: each has a table of its own."""


class BatchPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step: the rows to compute, decodes (rows of one token) first.

    Row i computes positions `starts[i]` to `starts[i] + counts[i] - 1` of `slots[i]`. If
    `samples[i]`, the token at position `starts[i] + counts[i]` is drawn from the row's last
    logits. An empty plan is a dummy step.

    A decode may also carry tokens that are *proposed* to follow its newest one: `proposed[i]`
    belongs to row i, which then has `counts[i] == 1 + len(proposed[i])`. They are computed as if
    they were the sequence's, and a token is drawn after each of them. The executor keeps these
    draws up to and including the first that differs from what was proposed at its position.
    An executor with a draft model or head finds `TO_BE_DRAFTED` in place of the tokens, and
    chooses them.

    `adapters` says which versions are put into which slots of adapters before anything else.

    An executor with an encoder of images keeps what came of each, by its digest, until a plan
    names it in `forgotten`. Those in `encoded` are encoded after that, and before the rows are
    computed, which show images that are kept then.
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
    forgotten: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(self.counts)

    @property
    def num_prefill_tokens(self) -> int:
        """All of these but the one token of each decode."""
        return sum(
            count
            for count, sample in zip(self.counts, self.samples, strict=True)
            if count > 1 or not sample
        )


class BatchResult(msgspec.Struct, frozen=True, array_like=True):
    """What a step produced.

    `token_ids` has the tokens of each row with `samples`, in row order: one, and for a row with
    proposed tokens as many more as `accepted` says (all rows with proposed tokens are in it).
    `logprobs` is parallel to it (None where the request asked for none, or as a whole when nobody
    asked).
    `prompt_logprobs[i]` belongs to row i: one entry for each prompt token at positions
    `starts[i] + 1` to `starts[i] + counts[i]` that is still part of the prompt.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprob | None] | None = None
    prompt_logprobs: dict[int, list[TokenLogprob]] = {}
    accepted: dict[int, int] = {}
    grammar_ends: dict[int, str | None] = {}
    """By slot: with the last of its tokens the output is complete by its grammar (None), or cannot
    go on for the reason given."""
    grammar_stalls: dict[int, str | None] = {}
    """By slot: its tokens do not count, because the grammar failed for the reason given. Compiled
    anew, with nothing shared yet, it may go on. None: what the grammar allows was not known in
    time."""
    mask_us: dict[int, int] = {}
    """By slot: microseconds that its masks took, where that is much."""
    pooled: dict[int, bytes] = {}
    """By row: the vector of a sequence that gets one instead of tokens, as float32 numbers."""
    mask_wait_us: int = 0
    """Microseconds that the step waited for masks."""
