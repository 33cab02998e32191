"""Whole answers: the sum of a sequence's deltas, and the best of several sequences."""

from array import array
from collections.abc import Sequence

from engine.shared.messages import TokenLogprob
from server.generate.fold import Delta, FinishReason, ScoredToken
from server.generate.run import Output
from server.schema.answer import Usage

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

    def whole(self) -> Delta:
        """Return the sum of all deltas."""
        text, scores = "".join(self._pieces), self._logprobs
        token_ids, prompt_scores = self._token_ids, self._prompt_logprobs
        return Delta(text, token_ids, scores, *self._reasons, prompt_scores, self.logprob_sum)


class BestOf:
    """Holds all deltas back, and shows the best sequences once all have ended.

    The best have the highest mean log probability per token.
    """

    def __init__(self, output: Output, prompts: int, n: int, best_of: int) -> None:
        """Each of `prompts` has `best_of` sequences, of which `n` go to `output`."""
        self._output = output
        self._n = n
        self._sums = [[DeltaSum() for _ in range(best_of)] for _ in range(prompts)]

    async def push(self, deltas: Sequence[tuple[int, Delta]], usage: Usage | None) -> None:
        """Add deltas; with `usage` they are the last."""
        best_of = len(self._sums[0])
        for index, delta in deltas:
            self._sums[index // best_of][index % best_of].add(delta)
        if usage is not None:
            best = [one.whole() for sums in self._sums for one in self._best(sums)]
            await self._output.push(list(enumerate(best)), usage)

    def _best(self, sums: list[DeltaSum]) -> list[DeltaSum]:
        def score(one: DeltaSum) -> float:
            return one.logprob_sum / max(1, len(one))

        return sorted(sums, key=score, reverse=True)[: self._n]
