"""Which tokens each row of a batch may draw."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from engine.batch.batch import SlotStart
from engine.grammar.compiler import CompiledGrammar, GrammarCompiler
from engine.grammar.follower import TOO_SLOW, GrammarFollower
from engine.grammar.mask_threads import MAX_SECONDS, PATIENCE, MaskJob, MaskThreads
from engine.shared.messages import GrammarSpec

IntArray = npt.NDArray[np.int64]

WORD_BITS = 32
MUCH_NS = 200_000
"""Nanoseconds from which on the time of a slot's masks is reported."""
ADVANCE_SECONDS = 0.03
"""What a step may take to follow all its tokens; sequences that are left over draw again."""
MAX_KEPT, KEPT_SECONDS = 8, 5.0
"""Late masks that are kept for sequences that draw again, and for how long."""
_NOTHING: Mapping[int, Sequence[int]] = MappingProxyType({})


class TokenMasks(msgspec.Struct, frozen=True):
    """The tokens that some rows may draw; all others may draw any."""

    rows: IntArray
    """[masked] rows of the batch, ascending."""
    bits: npt.NDArray[np.int32]
    """[masked, words] one bit per token, the lowest first; set is allowed."""
    endings: dict[int, int] = {}
    """By row: the token that ends what comes before the grammar, for rows that are in there. Who
    would rather end the output ends that part."""
    eos_token_ids: tuple[int, ...] = ()

    def allowed(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        """Return [masked, vocab]: whether the token may be drawn."""
        flags = np.unpackbits(self.bits.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        return flags.view(np.bool_)

    def allows_only(self, row: int, token_ids: IntArray) -> bool:
        """Whether the row, if it is masked, has no choice but among these tokens."""
        index = int(np.searchsorted(self.rows, row))
        if index == len(self.rows) or self.rows[index] != row:
            return False
        left = self.bits[index].copy()
        words, offsets = np.divmod(token_ids, WORD_BITS)
        np.bitwise_and.at(left, words, ~(np.uint32(1) << offsets.astype(np.uint32)).view(np.int32))
        return not left.any()


class Ends(NamedTuple):
    """The slots whose output cannot go on."""

    reasons: dict[int, str | None]
    """Why: it is complete (None), or wrong for the reason given."""
    surplus: dict[int, int]
    """How many of the last tokens came after the end, where there are any."""
    stalls: dict[int, str | None]
    """The slots whose tokens do not count: their masks were not ready in time (None), or their
    grammar has to be compiled anew before they are drawn, and what it failed for."""


class _Late(NamedTuple):
    """A mask that was not ready in time, and will be."""

    follower: GrammarFollower
    """Nobody asks it anything before the job is done."""
    job: MaskJob
    bits: npt.NDArray[np.int32]
    """[words] that the job fills."""
    since: float


class GrammarTable:
    """The followers of all slots, and the masks of their next tokens.

    Grammars are asked for and slots released by the engine's loop. Everything else is called by
    the thread that runs steps.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self.on_settled: Callable[[], None] = lambda: None
        """Called by another thread whenever a grammar that was asked for is settled."""
        self._compiler = compiler
        compiler.on_settled = lambda: self.on_settled()
        self._words = -(-vocab_size // WORD_BITS)
        self._vocab_size = vocab_size
        self._eos = tuple(token_id for token_id in eos_token_ids if token_id < vocab_size)
        flags = np.zeros(self._words * WORD_BITS, np.bool_)
        flags[:vocab_size] = True
        flags[list(self._eos)] = False
        self._free = np.packbits(flags, bitorder="little").view(np.int32)
        """[words] the mask that allows all tokens but those that end the output."""
        self._followers: dict[int, GrammarFollower] = {}
        self._assigned: dict[int, CompiledGrammar] = {}
        self._threads = MaskThreads()
        self._late: set[int] = set()
        """Slots whose masks are not ready, so that what is drawn for them does not count."""
        self._stalled: set[int] = set()
        """Slots whose newest token does not count, so that none does which a step in flight draws
        after it, until a sequence takes the slot again."""
        self._kept: list[_Late] = []
        """Late masks of sequences that have no slot, the oldest first."""
        self._resumed: dict[int, _Late] = {}
        """Those of sequences that have a slot again."""
        self.mask_us: dict[int, int] = {}
        """By slot: microseconds that the newest masks took, where that is much."""
        self.waited_us = 0
        """Microseconds that the newest step waited for its masks."""

    def ask(self, spec: GrammarSpec, tenant: int = 0) -> CompiledGrammar:
        """Return the grammar, compiled or not; it is kept while the answer is."""
        self._forget_late()  # they may take the room that this one needs
        return self._compiler.ask(spec, tenant)

    def assign(self, slot: int, grammar: CompiledGrammar) -> None:
        """The sequence that takes the slot next follows this grammar, which is settled."""
        self._assigned[slot] = grammar

    def start(self, start: SlotStart) -> None:
        """A sequence takes a slot; output that it has already is followed."""
        self.release(start.slot)
        sampling = start.sampling
        grammar = self._assigned.pop(start.slot, None)
        if sampling.grammar is None:
            return
        if grammar is None:  # nobody compiled it before the step
            grammar = self._compiler.compiled(sampling.grammar)
        for late in self._kept:
            if late.follower.is_at(grammar, start):
                self._kept = [each for each in self._kept if each is not late]
                self._resumed[start.slot] = late
                self._followers[start.slot] = late.follower
                return
        follower = GrammarFollower(grammar, self._compiler, sampling)
        if grammar.following.lock.locked():
            self._late.add(start.slot)
            self._followers[start.slot] = follower
            return
        for token_id in start.token_ids[start.num_prompt_tokens :]:
            follower.advance(token_id)
        self._followers[start.slot] = follower

    def release(self, slot: int) -> None:
        """No step in flight uses the slot and none will, until a sequence takes it again."""
        self._followers.pop(slot, None)
        self._resumed.pop(slot, None)
        self._late.discard(slot)
        self._stalled.discard(slot)

    def masks(
        self, slots: Sequence[int], proposed: Mapping[int, Sequence[int]] = _NOTHING
    ) -> TokenMasks | None:
        """Return the masks of a batch whose row i draws for `slots[i]`; None if it needs none.

        Takes some microseconds a row. On an accelerator that is while it computes the logits.

        Args:
            slots: of each row, in any order.
            proposed: by slot, tokens that may follow its output. Such a slot has as many rows
                more, one after the other: each draws what follows one more of these tokens.
        """
        self.mask_us, self.waited_us = {}, 0
        if not self._followers:
            return None
        masked: list[_Rows] = []
        for row, slot in enumerate(slots):
            follower = self._followers.get(slot)
            if follower is not None and (row == 0 or slots[row - 1] != slot):
                masked.append(_Rows(slot, row, follower, proposed.get(slot, ())))
        if not masked:
            return None
        grammars = {id(each.follower.grammar) for each in masked}
        alone = len(grammars) == 1 and sum(1 + len(each.proposed) for each in masked) == len(slots)
        return self._masks(masked, MAX_SECONDS if alone else PATIENCE)

    def choices(
        self, slots: Sequence[int], proposed: Mapping[int, Sequence[int]] = _NOTHING
    ) -> dict[int, list[list[int]]]:
        """Return the tokens that each slot with a grammar may draw, next and after proposed ones.

        The slots are different; `proposed` as for `masks`.
        """
        rows = [slot for slot in slots for _ in range(1 + len(proposed.get(slot, ())))]
        masks = self.masks(rows, proposed)
        if masks is None:
            return {}
        choices: dict[int, list[list[int]]] = {}
        for row, flags in zip(masks.rows.tolist(), masks.allowed(self._vocab_size), strict=True):
            choices.setdefault(rows[row], []).append(np.flatnonzero(flags).tolist())
        return choices

    def advance(self, slots: Sequence[int], token_ids: Sequence[int]) -> "Ends":
        """Each of the tokens was added to the output in its slot, in this order."""
        ends = Ends({}, {}, {})
        if not self._followers:
            return ends
        until = time.monotonic() + ADVANCE_SECONDS
        for slot, token_id in zip(slots, token_ids, strict=True):
            follower = self._followers.get(slot)
            if follower is None:
                continue
            if slot in ends.reasons:
                ends.surplus[slot] = ends.surplus.get(slot, 0) + 1
                continue
            if slot in self._stalled or slot in self._late or time.monotonic() > until:
                ends.stalls[slot] = follower.stalled
                self._stalled.add(slot)
                continue
            follower.advance(token_id)
            if follower.stalled is not None:
                ends.stalls[slot] = follower.stalled
                self._stalled.add(slot)
            elif follower.ended:
                ends.reasons[slot] = follower.error
        return ends

    def shutdown(self) -> None:
        """Stop compiling and computing; idempotent."""
        self._threads.shutdown()
        self._compiler.shutdown()

    def _masks(self, masked: list["_Rows"], patience: float) -> TokenMasks:
        rows = [np.arange(each.first, each.first + 1 + len(each.proposed)) for each in masked]
        bits = np.empty((sum(map(len, rows)), self._words), np.int32)
        bits[:] = self._free
        places = np.cumsum([0, *map(len, rows)]).tolist()
        for each in masked:
            late = self._resumed.get(each.slot)
            if late is not None and late.job.seconds is not None and each.proposed:
                del self._resumed[each.slot]  # it is for the next token alone
        resumed = {
            self._resumed[each.slot].job.following for each in masked if each.slot in self._resumed
        }
        jobs, fresh = [], []
        for each, place in zip(masked, places, strict=False):
            late = self._resumed.get(each.slot)
            fill = partial(self._fill_rows, bits, each, place)
            job = late.job if late else MaskJob(each.follower.grammar.following, fill)
            jobs.append(job)
            if each.slot not in self._late and job.following not in resumed:
                fresh.append(job)  # none that would keep those from being followed
        began = time.monotonic()
        self._threads.run(fresh, patience)
        self.waited_us = int((time.monotonic() - began) * 1e6)
        done, filled = [job.seconds for job in jobs], bits
        if None in done:
            bits = bits.copy()  # some of the other may still be written
        for each, job, seconds, row, place in zip(masked, jobs, done, rows, places, strict=False):
            self._settle(each, job, seconds, filled[place], bits[place])
            if each.slot in self._late or not each.follower.mask_computed():
                bits[place : place + len(row)] = self._free  # what is drawn does not count
        endings = {
            each.first: token_id
            for each in masked
            if each.follower.is_before and (token_id := each.follower.ending) is not None
        }
        return TokenMasks(np.concatenate(rows), bits, endings, self._eos)

    def _settle(
        self,
        rows: "_Rows",
        job: MaskJob,
        seconds: float | None,
        filled: npt.NDArray[np.int32],
        bits: npt.NDArray[np.int32],
    ) -> None:
        """Take note of how long the masks of one slot took, or of their being late.

        Args:
            rows: of the slot.
            job: begun in this step, which fills `filled`, or in an earlier one.
            seconds: what it took, None if it was not done.
            filled: [words].
            bits: [words], for what a job of an earlier step has filled.
        """
        follower = rows.follower
        self._late.discard(rows.slot)
        late = self._resumed.pop(rows.slot, None)
        if job.following.lock.locked() or (late is not None and rows.proposed):
            seconds = None  # to follow its tokens now would take as long as what holds the lock
        elif late is not None and seconds is not None:
            bits[:] = late.bits
        if job.is_over:
            follower.error = TOO_SLOW
            if job.seconds is None:  # others of this grammar would wait for the same thread
                follower.grammar.error = TOO_SLOW
                self._compiler.forget(follower.grammar)
        elif seconds is None and follower.grammar.error is not None:
            follower.error = follower.grammar.error
        elif seconds is None:
            self._late.add(rows.slot)
            if job.has_begun:
                self._forget_late()
                self._kept.append(late or _Late(follower, job, filled, time.monotonic()))
            seconds = max(follower.grammar.following.seconds, MUCH_NS * 1e-9)
        if seconds is not None and seconds >= MUCH_NS * 1e-9:
            self.mask_us[rows.slot] = int(seconds * 1e6)

    def _forget_late(self) -> None:
        until = time.monotonic() - KEPT_SECONDS
        self._kept = [late for late in self._kept[-MAX_KEPT:] if late.since >= until]

    def _fill_rows(self, bits: npt.NDArray[np.int32], rows: "_Rows", place: int) -> None:
        """Compute the masks of one slot."""
        if rows.follower.is_special(1 + len(rows.proposed)):
            # One after the other, up to the first proposed token that cannot come.
            follower = rows.follower.copy() if rows.proposed else rows.follower
            follower.fill(bits[place])
            for row, token_id in enumerate(rows.proposed, start=place + 1):
                follower.advance(token_id)
                if follower.ended or follower.stalled is not None:
                    break
                follower.fill(bits[row])
            return
        free, matcher = rows.follower.ahead(rows.proposed)
        if matcher is None:
            return
        row_bytes = self._words * bits.itemsize
        address = bits.ctypes.data + (place + free) * row_bytes
        rest = list(rows.proposed[free:])
        if rest:  # up to the first that cannot come
            matcher.unsafe_compute_mask_ptr_with_draft_token(  # type: ignore[attr-defined]
                address, row_bytes, rest
            )
        else:
            matcher.unsafe_compute_mask_ptr(address, row_bytes)


class _Rows(NamedTuple):
    """The rows of one slot."""

    slot: int
    first: int
    follower: GrammarFollower
    proposed: Sequence[int]


def grammar_table(
    model: Path, vocab_size: int, eos_token_ids: Sequence[int]
) -> GrammarTable | None:
    """Return the table for a model directory, None if there is no tokenizer in it.

    Nothing is read before the first grammar comes.
    """
    tokenizer = model / "tokenizer.json"
    if not tokenizer.is_file():
        return None
    compiler = GrammarCompiler(tokenizer, vocab_size, eos_token_ids)
    return GrammarTable(compiler, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
