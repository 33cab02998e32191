"""The state of grammars beyond what vLLM tracks: free text before them, and moved sequences."""

from collections.abc import Collection
from concurrent.futures import Future
from enum import Enum, auto
from typing import Any

import numpy as np
import torch
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from engine.shared.messages import SamplingParams


class _Part(Enum):
    OPENING = auto()
    """The output can become either part."""
    FREE = auto()
    GRAMMAR = auto()


class GrammarAfterText(StructuredOutputGrammar):  # type: ignore[misc]
    """A grammar after a free part, such as a model's reasoning, that ends with a marker.

    Follows the rules of `engine.grammar.follower.GrammarFollower`: in the free part every token is
    allowed but those that end the output, up to a token budget, after which the marker is forced.
    With an opening there is such a part only if the output begins with its tokens.

    Args:
        grammar: vLLM's compiled grammar, which has consumed nothing.
        sampling: has a `grammar_after`.
        tokenizer: vLLM's tokenizer.
        end_tokens: tokens that end the output.
    """

    def __init__(
        self, grammar: Any, sampling: SamplingParams, tokenizer: Any, end_tokens: Collection[int]
    ) -> None:
        self._grammar, self._tokenizer = grammar, tokenizer
        self._marker, self._budget = sampling.grammar_after, sampling.grammar_budget
        self._opening = self._tokens(sampling.grammar_opening) if sampling.grammar_opening else []
        self._ending = self._tokens(sampling.grammar_after)
        self._end_tokens = sorted(end_tokens)
        self._output: list[int] = []
        self._num_followed = 0
        """Tokens consumed in the grammar part."""
        self._part = _Part.OPENING if self._opening else _Part.FREE
        self._fits = bool(self._opening)
        """In the opening: whether the output fits the grammar, too."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Consume output tokens; return whether all were allowed."""
        return all([self._consume(request_id, token_id) for token_id in tokens])

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Return a prefix of proposed tokens that is allowed."""
        if self._part is _Part.GRAMMAR:
            allowed: list[int] = self._grammar.validate_tokens(tokens)
            return allowed
        if self._part is _Part.OPENING:
            return []
        left = self._budget - len(self._output) if self._budget else len(tokens)
        proposed: list[int] = []
        for token_id in tokens[: max(0, left)]:
            if token_id in self._end_tokens:
                return proposed
            proposed.append(token_id)
            if self._ends_free_part(proposed):
                return [*proposed, *self._grammar.validate_tokens(tokens[len(proposed) :])]
        return proposed

    def rollback(self, num_tokens: int) -> None:
        """Undo the newest tokens."""
        of_grammar = min(num_tokens, self._num_followed)
        if of_grammar:
            self._grammar.rollback(of_grammar)
            self._num_followed -= of_grammar
        del self._output[len(self._output) - num_tokens :]
        if of_grammar == num_tokens:
            return
        start = len(self._opening)
        if len(self._output) >= start and self._output[:start] == self._opening:
            self._part = _Part.FREE
        else:
            self._repeat()

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        """Set a row of the mask, int32 of shape (rows, words), to the allowed next tokens."""
        if self._part is _Part.GRAMMAR:
            self._grammar.fill_bitmask(bitmask, batch_index)
            return
        row = bitmask[batch_index].numpy().view(np.uint32)
        written = len(self._output) - self._budget
        if self._part is _Part.OPENING:
            if self._fits:
                self._grammar.fill_bitmask(bitmask, batch_index)
            else:
                row[:] = 0
            _allow(row, self._opening[len(self._output)])
        elif self._budget and written >= 0:
            row[:] = 0
            _allow(row, self._ending[min(written, len(self._ending) - 1)])
        else:
            row[:] = 0xFFFFFFFF
            for token_id in self._end_tokens:
                row[token_id // 32] &= ~np.uint32(1 << token_id % 32)

    def is_terminated(self) -> bool:
        """Return whether the output is complete."""
        return self._part is _Part.GRAMMAR and bool(self._grammar.is_terminated())

    def reset(self) -> None:
        """Return to the state before the first token."""
        self._output = []
        self._repeat()

    def _repeat(self) -> None:
        """Consume the output once more."""
        output, self._output, self._num_followed = self._output, [], 0
        self._grammar.reset()
        self._part = _Part.OPENING if self._opening else _Part.FREE
        self._fits = bool(self._opening)
        self.accept_tokens("", output)

    def _consume(self, request_id: str, token_id: int) -> bool:
        position = len(self._output)
        if self._part is _Part.FREE:
            if self._ends_free_part([token_id]):
                self._part = _Part.GRAMMAR
            self._output.append(token_id)
            return True
        self._output.append(token_id)
        if self._part is _Part.GRAMMAR:
            self._num_followed += 1
            return bool(self._grammar.accept_tokens(request_id, [token_id]))
        self._fits = self._fits and (
            self._grammar.validate_tokens([token_id]) == [token_id]
            and self._grammar.accept_tokens(request_id, [token_id])
        )
        if token_id != self._opening[position]:
            self._part = _Part.GRAMMAR
            return self._fits
        if len(self._output) == len(self._opening):
            self._part = _Part.FREE
            self._grammar.reset()
        return True

    def _ends_free_part(self, tokens: list[int]) -> bool:
        """Return whether the marker is complete with these tokens, each of one byte or more."""
        size = len(self._marker.encode()) + len(tokens)
        free = self._output[len(self._opening) :][-size:]
        return self._marker in self._tokenizer.decode([*free, *tokens])

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def _allow(row: "np.ndarray[Any, np.dtype[np.uint32]]", token_id: int) -> None:
    row[token_id // 32] |= np.uint32(1 << token_id % 32)


def follow_grammar(
    request: Any, sampling: SamplingParams, token_ids: list[int], tokenizer: Any
) -> None:
    """Complete the grammar of a vLLM request once it is compiled.

    Args:
        request: vLLM's `Request`.
        token_ids: output tokens from another engine, which the grammar consumes.
        tokenizer: vLLM's tokenizer.
    """
    structured_request = request.structured_output_request
    if structured_request is None or not (token_ids or sampling.grammar_after):
        return
    completed: Future[Any] = Future()

    def complete(compiled: "Future[Any]") -> None:
        try:
            grammar = compiled.result()
            if sampling.grammar_after:
                end_tokens = request.sampling_params.all_stop_token_ids
                grammar = GrammarAfterText(grammar, sampling, tokenizer, end_tokens)
            if token_ids and not grammar.accept_tokens(request.request_id, token_ids):
                raise ValueError("the grammar does not allow the output so far")
            completed.set_result(grammar)
        except Exception as error:  # the scheduler fails the request with it
            completed.set_exception(error)

    pending = structured_request._grammar
    if not isinstance(pending, Future):
        compiled: Future[Any] = Future()
        compiled.set_result(pending)
        pending = compiled
    structured_request.grammar = completed
    pending.add_done_callback(complete)
