"""Of several sequences of each prompt, only the best are shown."""

from collections.abc import Sequence

from server.api.shared.answer import Usage
from server.generate.answer import DeltaSum
from server.generate.fold import Delta
from server.generate.run import Output


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
            best = [one.as_delta() for sums in self._sums for one in self._best(sums)]
            await self._output.push(list(enumerate(best)), usage)

    def _best(self, sums: list[DeltaSum]) -> list[DeltaSum]:
        def score(one: DeltaSum) -> float:
            return one.logprob_sum / max(1, len(one))

        return sorted(sums, key=score, reverse=True)[: self._n]
