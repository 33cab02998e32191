"""The answer of one sequence: the sum of its deltas."""

from array import array

import msgspec

from engine.shared.messages import TokenLogprob
from server.generate.fold import Delta, FinishReason, ScoredToken


class Answer(msgspec.Struct):
    """The sum of the deltas of one sequence."""

    text: str
    token_ids: "array[int]"
    logprobs: list[ScoredToken] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt_logprobs: list[TokenLogprob] | None = None
    """Of every token of the prompt but the first, if asked for."""


_PIECES = 256
"""Pieces of text that become one."""


class DeltaSum:
    """Adds up the deltas of one sequence, keeping no more than the answer needs."""

    __slots__ = (
        "_logprobs", "_pieces", "_prompt_logprobs", "_reasons", "_token_ids", "logprob_sum",
    )  # fmt: skip

    def __init__(self) -> None:
        self.logprob_sum = 0.0
        """Of all tokens, if the engine reports log probabilities."""
        self._prompt_logprobs: list[TokenLogprob] | None = None
        self._pieces: list[str] = []
        self._token_ids = array("i")
        self._logprobs: list[ScoredToken] | None = None
        self._reasons: tuple[FinishReason | None, int | str | None] = (None, None)

    def add(self, delta: Delta) -> None:
        """Add a delta; the last one says how the answer ended."""
        if delta.text:
            self._pieces.append(delta.text)
            if len(self._pieces) == _PIECES:
                self._pieces = ["".join(self._pieces)]
        self._token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            if self._logprobs is None:
                self._logprobs = []
            self._logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
        self.logprob_sum += delta.logprob_sum
        self._reasons = delta.finish_reason, delta.stop_reason

    def __len__(self) -> int:
        """Tokens."""
        return len(self._token_ids)

    @property
    def size(self) -> int:
        """Tokens, and log probabilities of them."""
        count = len(self._token_ids)
        for each in self._logprobs or ():
            count += 1 if each.logprob is None else 1 + len(each.logprob.top_ids)
        for score in self._prompt_logprobs or ():
            count += 1 + len(score.top_ids)
        return count

    def as_delta(self) -> Delta:
        """Return the whole as if it had come at once."""
        text, token_ids = "".join(self._pieces), list(self._token_ids)
        scores, reasons = self._logprobs, self._reasons
        return Delta(text, token_ids, scores, *reasons, self._prompt_logprobs, self.logprob_sum)

    def answer(self) -> Answer:
        """Return the whole answer."""
        text, reasons = "".join(self._pieces), self._reasons
        return Answer(text, self._token_ids, self._logprobs, *reasons, self._prompt_logprobs)
