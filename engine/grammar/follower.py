"""Tracks one request's output in its grammar."""

import copy
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from engine.batch.batch import GRAMMAR_CONFLICT, SlotStart
from engine.grammar.compiler import CompiledGrammar, GrammarCompiler
from engine.grammar.mask_threads import MAX_SECONDS
from engine.shared.matchers import is_dead_end, shortened_message
from engine.shared.messages import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger(__name__)

TOO_SLOW = (
    "the grammar takes too long to follow: the next token mask was not known within "
    f"{MAX_SECONDS * 1000:.0f} ms; make it simpler"
)
NOT_COMPUTED = "the next token mask cannot be computed"
_DEAD_END = "nothing that fits the grammar can follow the output"
_LIMITS = ("too many states", "too many expressions")
"""Matcher errors that a fresh matcher may not hit."""


class GrammarFollower:
    """The state of a request's output in its grammar.

    A free part can precede the grammar, such as a model's reasoning, which ends with a marker.
    There every token is allowed but those that end the output, up to a token budget: then the
    marker is forced. With an opening there is such a part only if the output begins with that text,
    as tokenized. Nothing here compiles or blocks.
    """

    def __init__(
        self, grammar: CompiledGrammar, compiler: GrammarCompiler, sampling: SamplingParams
    ) -> None:
        self.grammar = grammar
        self._compiler = compiler
        self._sampling = sampling
        self._matcher: LLMatcher | None = None
        self._marker = sampling.grammar_after.encode()
        self._free_text = b""
        self._opening: tuple[int, ...] = ()
        """Remaining tokens of the opening, while the output may still match it."""
        self._budget = sampling.grammar_budget
        self._output: list[int] = []
        self.error: str | None = None
        """Why the output cannot continue."""
        self.stalled: str | None = None
        """Why the output cannot continue until its grammar is compiled again."""
        if self._marker and sampling.grammar_opening:
            self._opening = compiler.tokens_of(sampling.grammar_opening)
        self._ending = compiler.tokens_of(sampling.grammar_after) if self._marker else ()
        if self._opening or not self._marker:
            self._start_grammar()

    def copy(self) -> "GrammarFollower":
        """Return an independent copy."""
        other = copy.copy(self)
        other._output = self._output.copy()
        other._matcher = None if self._matcher is None else self._matcher.deep_copy()
        return other

    def is_at(self, grammar: CompiledGrammar, start: SlotStart) -> bool:
        """Return whether it has consumed exactly the output of a sequence with this grammar."""
        same = self.grammar is grammar and self._sampling == start.sampling
        return same and self._output == start.token_ids[start.num_prompt_tokens :]

    @property
    def ended(self) -> bool:
        """Whether the output cannot be extended: it is complete, or there is an error."""
        if self.error is not None:
            return True
        matcher = self._matcher
        return matcher is not None and matcher.is_stopped() and not matcher.is_error()

    @property
    def is_in_free_part(self) -> bool:
        """Whether the output is in the free part before the grammar."""
        return self._matcher is None and not self._opening and self.error is None

    @property
    def ending(self) -> int | None:
        """The token that ends the free part, if it is a single token."""
        return self._ending[0] if len(self._ending) == 1 else None

    def advance(self, token_id: int) -> None:
        """Consume a token added to the output; ignored after the end, and once stalled."""
        if self.stalled is not None or self.ended:
            return
        started_at = time.thread_time()
        self._follow(token_id)
        if time.thread_time() - started_at > MAX_SECONDS:
            self.error = TOO_SLOW

    def _follow(self, token_id: int) -> None:
        self._output.append(token_id)
        if self._opening:
            self._follow_opening(token_id)
        elif self._matcher is None:
            self._free_text += self._bytes(token_id)
            if self._marker in self._free_text:
                self._start_grammar()
            else:
                self._free_text = self._free_text[-len(self._marker) :]
        else:
            self._consume(self._matcher, token_id)

    def is_special(self, ahead: int) -> bool:
        """Return whether an opening or a forced marker affects any of the next `ahead` masks."""
        if self._opening:
            return True
        due = len(self._output) + ahead > self._budget > 0
        return due and self._matcher is None

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        """Restrict a mask that allows everything but end tokens to the allowed next tokens."""
        if self.stalled is not None or self.error is not None:
            return
        token_id = self._opening[0] if self._opening else None
        if self._matcher is not None:
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        elif token_id is None and len(self._output) >= self._budget > 0:
            written = min(len(self._output) - self._budget, len(self._ending) - 1)
            token_id = self._ending[written]
        if token_id is not None:
            if self._matcher is None:
                row[:] = 0
            row.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)

    def matcher_for(self, proposed: Sequence[int]) -> tuple[int, "LLMatcher | None"]:
        """Return which of the next masks depend on the grammar, and from which state.

        Returns:
            The number of masks (after the output and after each proposed token) that precede the
            grammar, and the matcher of the first mask after them; None if there is none.
        """
        if self.stalled is not None or self.error is not None:
            return len(proposed) + 1, None
        if self._matcher is not None:
            return 0, self._matcher
        seen = self._free_text
        for count, token_id in enumerate(proposed, start=1):
            seen += self._bytes(token_id)
            if self._marker in seen and self.grammar.matcher is not None:
                return count, self.grammar.matcher.deep_copy()
        return len(proposed) + 1, None

    def mask_computed(self) -> bool:
        """Handle a computed mask; return whether it is usable.

        After an error the matcher is left alone: a thread may still use it.
        """
        matcher = self._matcher
        if self.error is None and matcher is not None and matcher.is_error():
            self._stop(matcher)
        return self.error is None and self.stalled is None

    def _consume(self, matcher: "LLMatcher", token_id: int) -> None:
        if not matcher.consume_token(token_id):
            self._stop(matcher)
        elif matcher.is_stopped() and not matcher.is_accepting():
            self.error = _DEAD_END

    def _follow_opening(self, token_id: int) -> None:
        """Track the opening, the grammar, or both while the output can be either."""
        expected, *left = self._opening
        if token_id != expected and self._matcher is not None:
            self._opening = ()
            self._consume(self._matcher, token_id)
            return
        self._opening = tuple(left)
        if token_id != expected:
            self.error = GRAMMAR_CONFLICT
        elif self._matcher is not None:
            fits = left and self._matcher.try_consume_tokens([token_id])
            self._matcher = self._matcher if fits else None

    def _start_grammar(self) -> None:
        if self.grammar.matcher is None:
            self.error = self.grammar.error or "the grammar was not compiled"
            return
        self._matcher = self.grammar.matcher.deep_copy()

    def _stop(self, matcher: "LLMatcher") -> None:
        """Record why the matcher failed.

        Copies of a matcher share a bounded cache of lexer states. One that exceeds the limit needs
        a newly compiled grammar, and so do all later requests.
        """
        message = matcher.get_error()
        reason = f"the output cannot follow its grammar: {shortened_message(message)}"
        if any(limit in message for limit in _LIMITS):
            self._compiler.forget(self.grammar)
            self.stalled = reason
        elif is_dead_end(message):
            self.error = _DEAD_END
        else:
            logger.debug("%s", reason)
            self.error = GRAMMAR_CONFLICT

    def _bytes(self, token_id: int) -> bytes:
        text: bytes = self._compiler.tokenizer().decode_bytes([token_id])
        return text
