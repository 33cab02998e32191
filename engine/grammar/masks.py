"""Token masks of a batch."""

import threading
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
from engine.grammar.follower import NOT_COMPUTED, TOO_SLOW, GrammarFollower
from engine.grammar.mask_threads import MAX_SECONDS, PATIENCE, MaskJob, MaskRound, MaskThreads
from engine.shared.messages import GrammarSpec

IntArray = npt.NDArray[np.int64]

WORD_BITS = 32
MUCH_NS = 200_000
"""Nanoseconds above which the time of a slot's masks is reported."""
ADVANCE_SECONDS = 0.03
"""Maximum seconds per step for consuming tokens; sequences beyond it sample again."""
MAX_KEPT, KEPT_SECONDS = 8, 5.0
"""Maximum number, and age in seconds, of late masks kept for sequences that sample again."""
_NOTHING: Mapping[int, Sequence[int]] = MappingProxyType({})


class TokenMasks(msgspec.Struct, frozen=True):
    """The allowed tokens of masked rows; other rows allow all."""

    rows: IntArray
    """[masked] masked rows of the batch, ascending."""
    bits: npt.NDArray[np.int32]
    """[masked, words] one bit per token, lowest first; set means allowed."""
    endings: dict[int, int] = {}
    """By row in the free part before a grammar: the token that ends that part. It replaces an end
    of the output."""
    eos_token_ids: tuple[int, ...] = ()

    def allowed(self, vocab_size: int) -> npt.NDArray[np.bool_]:
        """Return [masked, vocab]: whether each token is allowed."""
        flags = np.unpackbits(self.bits.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        return flags.view(np.bool_)

    def allows_only(self, row: int, token_ids: IntArray) -> bool:
        """Return whether a row is masked and allows none but these tokens."""
        index = int(np.searchsorted(self.rows, row))
        if index == len(self.rows) or self.rows[index] != row:
            return False
        left = self.bits[index].copy()
        words, offsets = np.divmod(token_ids, WORD_BITS)
        np.bitwise_and.at(left, words, ~(np.uint32(1) << offsets.astype(np.uint32)).view(np.int32))
        return not left.any()


class Ends(NamedTuple):
    """The slots whose output ended or stalled."""

    reasons: dict[int, str | None]
    """Why it ended: complete (None), or the error."""
    surplus: dict[int, int]
    """Number of newest tokens after the end, for slots that have any."""
    stalls: dict[int, str | None]
    """Slots whose tokens do not count: their masks were late (None), or their grammar has to be
    compiled again for the given reason."""


class _LateMask(NamedTuple):
    """A mask that was not computed in time."""

    follower: GrammarFollower
    """Not to be used before the job is done."""
    job: MaskJob
    bits: npt.NDArray[np.int32]
    """[words] filled by the job."""
    since: float


class GrammarTable:
    """The followers of all slots, and the masks of their next tokens.

    The engine's loop requests grammars and releases slots. Everything else is called by the thread
    that runs steps.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self.on_settled: Callable[[], None] = lambda: None
        """Called from another thread whenever a requested grammar is settled."""
        self._compiler = compiler
        compiler.on_settled = lambda: self.on_settled()
        self._words = -(-vocab_size // WORD_BITS)
        self._vocab_size = vocab_size
        self._eos = tuple(token_id for token_id in eos_token_ids if token_id < vocab_size)
        flags = np.zeros(self._words * WORD_BITS, np.bool_)
        flags[:vocab_size] = True
        flags[list(self._eos)] = False
        self._free = np.packbits(flags, bitorder="little").view(np.int32)
        """[words] mask that allows all tokens but those that end the output."""
        self._followers: dict[int, GrammarFollower] = {}
        self._assigned: dict[int, CompiledGrammar] = {}
        self._threads = MaskThreads()
        self._late: set[int] = set()
        """Slots whose masks are not ready: tokens sampled for them do not count."""
        self._stalled: set[int] = set()
        """Slots whose newest token does not count: neither do those of steps in flight, until a
        sequence takes the slot again."""
        self._lock = threading.Lock()
        self._late_masks: list[_LateMask] = []
        """Late masks of sequences without a slot, oldest first; guarded by the lock."""
        self._resumed: dict[int, _LateMask] = {}
        """Late masks of sequences that have a slot again."""
        self.mask_us: dict[int, int] = {}
        """By slot: microseconds of the newest masks, if above `MUCH_NS`."""
        self.waited_us = 0
        """Microseconds that the newest step waited for its masks."""

    def request(self, spec: GrammarSpec, tenant: int = 0) -> CompiledGrammar:
        """Return the grammar, compiled or not; it is kept while the result is referenced."""
        self._keep_late_masks()  # frees memory that this one may need
        return self._compiler.request(spec, tenant)

    def assign(self, slot: int, grammar: CompiledGrammar) -> None:
        """Set the grammar, which is settled, of the sequence that takes the slot next."""
        self._assigned[slot] = grammar

    def start(self, start: SlotStart) -> None:
        """Start tracking a sequence in a slot, consuming its existing output."""
        self.release(start.slot)
        sampling = start.sampling
        grammar = self._assigned.pop(start.slot, None)
        if sampling.grammar is None:
            return
        if grammar is None:  # it was not compiled before the step
            grammar = self._compiler.compiled(sampling.grammar)
        with self._lock:
            late = next((e for e in self._late_masks if e.follower.is_at(grammar, start)), None)
            if late is not None:
                self._late_masks = [each for each in self._late_masks if each is not late]
        if late is not None:
            self._resumed[start.slot] = late
            self._followers[start.slot] = late.follower
            return
        follower = GrammarFollower(grammar, self._compiler, sampling)
        if grammar.state.lock.locked():
            self._late.add(start.slot)
            self._followers[start.slot] = follower
            return
        for token_id in start.token_ids[start.num_prompt_tokens :]:
            follower.advance(token_id)
        self._followers[start.slot] = follower

    def release(self, slot: int) -> None:
        """Stop tracking a slot; no step in flight uses it."""
        self._followers.pop(slot, None)
        self._resumed.pop(slot, None)
        self._late.discard(slot)
        self._stalled.discard(slot)

    def begin(
        self, slots: Sequence[int], proposed: Mapping[int, Sequence[int]] = _NOTHING
    ) -> "PendingMasks | None":
        """Start computing the masks of a batch whose row i samples for `slots[i]`, in threads.

        Return None if it needs none. `finish` has to follow before the batch's tokens are added.

        Args:
            slots: of each row, in any order.
            proposed: by slot, draft tokens after its output. Such a slot has one more consecutive
                row per draft token, which samples the token after it.
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
        num_rows = sum(1 + len(each.proposed) for each in masked)
        share_grammar = len(grammars) == 1 and num_rows == len(slots)
        return self._begin(masked, MAX_SECONDS if share_grammar else PATIENCE)

    def finish(self, pending: "PendingMasks") -> TokenMasks:
        """Wait for the masks of the newest batch, for a limited time, and return them."""
        masked, rows, offsets, bits, jobs, batch, patience = pending
        started_at = time.monotonic()
        self._threads.wait(batch, patience)
        self.waited_us = int((time.monotonic() - started_at) * 1e6)
        done, filled = [job.seconds for job in jobs], bits
        if None in done or not batch.done.is_set():
            # Late masks stay in the original, to which threads may still write.
            bits = bits.copy()
        for each, job, seconds, row, offset in zip(masked, jobs, done, rows, offsets, strict=False):
            self._settle(each, job, seconds, filled[offset], bits[offset])
            if each.slot in self._late or not each.follower.mask_computed():
                bits[offset : offset + len(row)] = self._free  # the sampled token does not count
        endings = {
            each.first: token_id
            for each in masked
            if each.follower.is_in_free_part and (token_id := each.follower.ending) is not None
        }
        return TokenMasks(np.concatenate(rows), bits, endings, self._eos)

    def masks(
        self, slots: Sequence[int], proposed: Mapping[int, Sequence[int]] = _NOTHING
    ) -> TokenMasks | None:
        """Begin and finish the masks of a batch."""
        pending = self.begin(slots, proposed)
        return None if pending is None else self.finish(pending)

    def choices(
        self, slots: Sequence[int], proposed: Mapping[int, Sequence[int]] = _NOTHING
    ) -> dict[int, list[list[int]]]:
        """Return the allowed tokens of each slot with a grammar, next and after proposed tokens.

        The slots are distinct; `proposed` as for `masks`.
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
        """Consume the tokens added to the outputs of these slots, in order."""
        ends = Ends({}, {}, {})
        if not self._followers:
            return ends
        deadline = time.monotonic() + ADVANCE_SECONDS
        for slot, token_id in zip(slots, token_ids, strict=True):
            follower = self._followers.get(slot)
            if follower is None:
                continue
            if slot in ends.reasons:
                ends.surplus[slot] = ends.surplus.get(slot, 0) + 1
                continue
            if slot in self._stalled or slot in self._late or time.monotonic() > deadline:
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

    def _begin(self, masked: list["_Rows"], patience: float) -> "PendingMasks":
        rows = [np.arange(each.first, each.first + 1 + len(each.proposed)) for each in masked]
        bits = np.empty((sum(map(len, rows)), self._words), np.int32)
        bits[:] = self._free
        offsets = np.cumsum([0, *map(len, rows)]).tolist()
        for each in masked:
            late = self._resumed.get(each.slot)
            if late is not None and late.job.seconds is not None and each.proposed:
                del self._resumed[each.slot]  # it covers the next token only
        resumed = {
            self._resumed[each.slot].job.state for each in masked if each.slot in self._resumed
        }
        jobs, fresh = [], []
        for each, offset in zip(masked, offsets, strict=False):
            late = self._resumed.get(each.slot)
            fill = partial(self._fill_rows, bits, each, offset)
            job = late.job if late else MaskJob(each.follower.grammar.state, fill)
            jobs.append(job)
            if each.slot not in self._late and job.state not in resumed:
                fresh.append(job)  # excludes jobs that would block the resumed ones
        return PendingMasks(masked, rows, offsets, bits, jobs, self._threads.start(fresh), patience)

    def _settle(
        self,
        rows: "_Rows",
        job: MaskJob,
        seconds: float | None,
        filled: npt.NDArray[np.int32],
        bits: npt.NDArray[np.int32],
    ) -> None:
        """Record how long the masks of one slot took, or that they are late.

        Args:
            rows: of the slot.
            job: started in this step, which fills `filled`, or in an earlier one.
            seconds: its processor time, None if it is not done.
            filled: [words].
            bits: [words], receives the result of an earlier step's job.
        """
        follower = rows.follower
        self._late.discard(rows.slot)
        late = self._resumed.pop(rows.slot, None)
        if job.state.lock.locked() or (late is not None and rows.proposed):
            seconds = None  # consuming its tokens now would block on the lock
        elif late is not None and seconds is not None:
            bits[:] = late.bits
        if job.failed:
            follower.error = NOT_COMPUTED
        elif job.is_over:
            follower.error = TOO_SLOW
            if job.seconds is None:  # other requests with this grammar would wait for its thread
                follower.grammar.error = TOO_SLOW
                self._compiler.forget(follower.grammar)
        elif seconds is None and follower.grammar.error is not None:
            follower.error = follower.grammar.error
        elif seconds is None:
            self._late.add(rows.slot)
            if job.has_started:
                self._keep_late_masks(late or _LateMask(follower, job, filled, time.monotonic()))
            seconds = max(follower.grammar.state.seconds, MUCH_NS * 1e-9)
        if seconds is not None and seconds >= MUCH_NS * 1e-9:
            self.mask_us[rows.slot] = int(seconds * 1e6)

    def _keep_late_masks(self, *newest: _LateMask) -> None:
        """Add late masks, and drop all but the newest ones."""
        earliest = time.monotonic() - KEPT_SECONDS
        with self._lock:
            kept = [late for late in self._late_masks[-MAX_KEPT:] if late.since >= earliest]
            self._late_masks = [*kept, *newest]

    def _fill_rows(self, bits: npt.NDArray[np.int32], rows: "_Rows", offset: int) -> None:
        """Compute the masks of one slot."""
        if rows.follower.is_special(1 + len(rows.proposed)):
            # Sequentially, up to the first proposed token that is not allowed.
            follower = rows.follower.copy() if rows.proposed else rows.follower
            follower.fill(bits[offset])
            for row, token_id in enumerate(rows.proposed, start=offset + 1):
                follower.advance(token_id)
                if follower.ended or follower.stalled is not None:
                    break
                follower.fill(bits[row])
            return
        free, matcher = rows.follower.matcher_for(rows.proposed)
        if matcher is None:
            return
        row_bytes = self._words * bits.itemsize
        address = bits.ctypes.data + (offset + free) * row_bytes
        remaining = list(rows.proposed[free:])
        if remaining:  # up to the first one that is not allowed
            matcher.unsafe_compute_mask_ptr_with_draft_token(  # type: ignore[attr-defined]
                address, row_bytes, remaining
            )
        else:
            matcher.unsafe_compute_mask_ptr(address, row_bytes)


class PendingMasks(NamedTuple):
    """The masks of one batch, while threads compute them."""

    masked: list["_Rows"]
    rows: list[IntArray]
    """Per slot, its rows."""
    offsets: list[int]
    """Per slot, its first row of `bits`."""
    bits: npt.NDArray[np.int32]
    jobs: list[MaskJob]
    """Per slot."""
    round: MaskRound
    patience: float


class _Rows(NamedTuple):
    """The rows of one slot."""

    slot: int
    first: int
    follower: GrammarFollower
    proposed: Sequence[int]


def grammar_table(
    model: Path, vocab_size: int, eos_token_ids: Sequence[int]
) -> GrammarTable | None:
    """Return the table for a model directory, None if it has no tokenizer.

    Nothing is read before the first grammar.
    """
    tokenizer = model / "tokenizer.json"
    if not tokenizer.is_file():
        return None
    compiler = GrammarCompiler(tokenizer, vocab_size, eos_token_ids)
    return GrammarTable(compiler, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
