"""The tokens of one request on their way from its front end's router to the HTTP layer."""

import asyncio
from collections.abc import Callable

from engine.shared.messages import AddRequest, RequestOutput
from server.router.engine_times import EngineTimes
from server.router.generation_client import KillsEngines, NoEngineAvailable, ReaderTooSlow
from server.router.request import RoutedRequest

MAX_BACKLOG = 1 << 16
"""Unread tokens after which the request of a client that does not read is aborted."""

_MERGED = 64
"""Unread outputs that become one."""


class RequestStream:
    """The outputs of one request that have not been read yet.

    Args:
        message: what is asked for; the router gives it its id.
        on_close: called when the stream is closed by its reader.
        pinned_rank: the only engine that may run it.
    """

    def __init__(
        self,
        message: AddRequest,
        on_close: Callable[["RequestStream"], None],
        pinned_rank: int | None = None,
    ) -> None:
        self.request = RoutedRequest(message, pinned_rank)
        """The request as the router keeps it."""
        self.finished = False
        self._on_close = on_close
        self._unread: list[RequestOutput] = []
        self._merge_at = _MERGED
        self._backlog = 0
        self._error: NoEngineAvailable | KillsEngines | ReaderTooSlow | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def id(self) -> int:
        """What engines call the sequence."""
        return self.request.id

    # -- for the router's shell ------------------------------------------------------------------

    def put(self, output: RequestOutput) -> None:
        """Take what one step added."""
        self._unread.append(output)
        self.finished = output.finish_reason is not None
        if len(self._unread) >= self._merge_at:
            self._merge_unread()
        self._wake()

    def _merge_unread(self) -> None:
        piece = merge(self._unread[-_MERGED:])
        self._unread[-_MERGED:] = [piece]
        self._merge_at = len(self._unread) + _MERGED
        self._backlog += weight(piece)
        if self._backlog > MAX_BACKLOG and not self.finished:
            self.close()
            self.finished = True
            self._error = ReaderTooSlow("The client read too slowly: the request was aborted.")

    def fail(self, error: NoEngineAvailable | KillsEngines) -> None:
        """End the stream: nothing can go on with it."""
        self.finished = True
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- for the HTTP layer (`server.router.generation_client.TokenStream`) ----------------------

    @property
    def times(self) -> EngineTimes:
        return self.request.times

    async def next(self) -> RequestOutput:
        """Wait for and return everything new since the last call, merged."""
        while (output := self.take()) is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        return output

    def take(self) -> RequestOutput | None:
        """Return everything new since the last call, merged; None if there is nothing yet.

        Raises:
            NoEngineAvailable, KillsEngines, ReaderTooSlow: the stream has ended without its last
                token.
        """
        if not self._unread:
            if self._error is not None:
                raise self._error
            return None
        outputs, self._unread = self._unread, []
        self._merge_at, self._backlog = _MERGED, 0
        return outputs[0] if len(outputs) == 1 else merge(outputs)

    def close(self) -> None:
        """Forget the request, aborting it if it has not finished; idempotent."""
        self._on_close(self)


def weight(output: RequestOutput) -> int:
    """Return how much an output holds, in tokens; scores weigh like the tokens that they name."""
    count = len(output.token_ids)
    if output.logprobs:
        count += sum(2 + len(each.top_ids) for each in output.logprobs)
    return count


def merge(outputs: list[RequestOutput]) -> RequestOutput:
    """Return consecutive outputs of one request as one, but for their times."""
    first, last = outputs[0], outputs[-1]
    logprobs = None
    if any(output.logprobs is not None for output in outputs):
        logprobs = [each for output in outputs for each in output.logprobs or []]
    return RequestOutput(
        id=first.id,
        token_ids=[token for output in outputs for token in output.token_ids],
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        logprobs=logprobs,
        prompt_logprobs=next((o.prompt_logprobs for o in outputs if o.prompt_logprobs), None),
        num_cached_tokens=max(output.num_cached_tokens for output in outputs),
        error=last.error,
        refused=last.refused,
        error_param=last.error_param,
        no_room=last.no_room,
    )
