"""Calls of engine utilities that wait for their answers."""

import asyncio

from engine.shared.messages import UtilityResult


class UtilityCalls:
    """Matches answers to calls by (call id, rank); every call gets exactly one.

    A call remembers which process it went to: that another one ended in its place says nothing.
    """

    def __init__(self) -> None:
        self._next_id = 0
        self._open: dict[tuple[int, int], asyncio.Future[UtilityResult]] = {}
        self._sent_to: dict[tuple[int, int], int] = {}

    def new_id(self) -> int:
        """Return a call id; one call may go to several engines."""
        self._next_id += 1
        return self._next_id

    def expect(self, call_id: int, rank: int, incarnation: int) -> None:
        """Note that an engine process is about to be called; `answer` has to follow."""
        self._sent_to[call_id, rank] = incarnation
        self._open[call_id, rank] = asyncio.get_running_loop().create_future()

    async def answer(self, call_id: int, rank: int, within: float) -> UtilityResult:
        """Wait until an engine has answered, has gone, or has let `within` seconds pass."""
        try:
            return await asyncio.wait_for(self._open[call_id, rank], within)
        except TimeoutError:
            error = f"engine {rank} did not answer within {within:g} s; it may do it yet"
            return UtilityResult(call_id, rank, error=error)
        finally:
            del self._open[call_id, rank], self._sent_to[call_id, rank]

    def answered(self, result: UtilityResult) -> None:
        """Take an answer; one that nobody waits for is dropped."""
        answer = self._open.get((result.call_id, result.rank))
        if answer is not None and not answer.done():
            answer.set_result(result)

    def engine_lost(self, rank: int, incarnation: int) -> None:
        """Answer for an engine process that cannot."""
        for (call_id, of_rank), sent_to in list(self._sent_to.items()):
            if (of_rank, sent_to) == (rank, incarnation):
                error = f"engine {rank} died before it answered"
                self.answered(UtilityResult(call_id, rank, error=error))
