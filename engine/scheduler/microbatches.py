"""Which decodes a step may have, so that all stages of a pipeline have one at any time."""

from collections.abc import Sequence

from engine.scheduler.request import Request


class Microbatches:
    """Spreads running sequences over the steps that are in flight together.

    With one stage a sequence may be in every step. With N stages N steps are computed at once, and
    the token that one of them draws is known to the executor when it begins the N-th after it. So a
    sequence is decoded in every N-th step at most, and no step takes more than its share of them:
    else all would be in one, and the stages would wait for each other.
    """

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages

    def of_step(self, step: int, ready: list[Request], running: Sequence[Request]) -> list[Request]:
        """Return those of the ready decodes that step number `step` may have, in their order.

        Args:
            ready: the sequences whose next token could be planned.
            running: all that run.
        """
        if self._num_stages == 1:
            return ready
        known = [request for request in ready if self._is_known(request, step)]
        decoding = sum(not request.queued_tokens for request in running)
        return known[: -(-decoding // self._num_stages)]

    def _is_known(self, request: Request, step: int) -> bool:
        """Whether the token that it goes on from is drawn before the step begins."""
        return not request.num_pending_tokens or step - request.drawn_in >= self._num_stages
