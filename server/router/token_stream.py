"""Streams of outputs from a front end's router to the HTTP layer."""

import asyncio
from collections.abc import Callable

from engine.shared.messages import AddRequest, RequestOutput
from server.limits import MAX_UNREAD
from server.router.request import EngineTimes, RoutedRequest

_MERGE_COUNT = 64
"""Number of unread outputs of a sequence that are merged into one."""

_MAX_TAKEN = 1024
"""Tokens and scores taken at a time: rendering them takes a few milliseconds."""


class ReaderTooSlow(Exception):
    """The client did not read its outputs in time; the request was aborted."""


class UnreadOutputs:
    """Unread outputs of a request's sequences, and their total weight.

    If the limit is exceeded while no reader waits, the client is too slow and the request is
    aborted; if a reader is waiting, only this process is slow.
    """

    def __init__(self) -> None:
        self._streams: list[RequestStream] = []
        self._ready: dict[RequestStream, None] = {}
        """Sequences with unread outputs, in reading order."""
        self._weight = 0
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._reader_waits = False
        self._has_remaining = False
        """Whether the last read left outputs behind because of its size limit."""

    # -- for the streams -------------------------------------------------------------------------

    def add(self, stream: "RequestStream") -> int:
        """Add a sequence; return its number, from 0."""
        self._streams.append(stream)
        return len(self._streams) - 1

    def arrived(self, stream: "RequestStream", output: RequestOutput) -> None:
        """Record a new output of a sequence."""
        self._ready.setdefault(stream)
        self._weight += weight(output)
        if self._weight > MAX_UNREAD and not self._reader_waits and self._error is None:
            self._error = ReaderTooSlow("The client read too slowly: the request was aborted.")
            for each in self._streams:
                each.close()
                each.finished = True
        self._wake()

    def fail(self, error: Exception) -> None:
        """Raise an error to the reader once all earlier outputs have been read."""
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- for the reader --------------------------------------------------------------------------

    async def next(self) -> list[tuple[int, RequestOutput]]:
        """Wait for new outputs and return some of them, each with the number of its sequence.

        Each output is returned once.

        Raises:
            NoEngineAvailable, KillsEngines, ReaderTooSlow: a sequence ended without its last token.
        """
        self._reader_waits = True
        try:
            if self._has_remaining:
                await asyncio.sleep(0)  # let other requests run between the parts of a large answer
            while not (taken := self.take()):
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
                self._waiter = None
            return taken
        finally:
            self._reader_waits = False

    def take(self) -> list[tuple[int, RequestOutput]]:
        """Return what `next` would, without waiting; empty if there is nothing yet."""
        ready, taken, total = self._ready, list[tuple[int, RequestOutput]](), 0
        for _ in range(len(ready)):
            if total >= _MAX_TAKEN:
                break
            stream = next(iter(ready))
            del ready[stream]
            output, has_more = stream.take()
            if has_more:
                ready[stream] = None  # behind the others
            total += weight(output)
            taken.append((stream.number, output))
        self._weight -= total
        self._has_remaining = bool(ready)
        if not taken and self._error is not None:
            raise self._error
        return taken


class RequestStream:
    """Outputs of one sequence.

    Args:
        message: the request; the router assigns its id.
        on_close: called when the stream is closed by its reader.
        pinned_rank: the only engine that may run it.
        unread: shared by all sequences of the client's request; None if it is read by itself.
    """

    def __init__(
        self,
        message: AddRequest,
        on_close: Callable[["RequestStream"], None],
        pinned_rank: int | None = None,
        unread: UnreadOutputs | None = None,
    ) -> None:
        self.request = RoutedRequest(message, pinned_rank)
        """The router's state of the request."""
        self.finished = False
        self.unread = UnreadOutputs() if unread is None else unread
        self.number = self.unread.add(self)
        """Number of the sequence in `unread`."""
        self._on_close = on_close
        self._pieces: list[RequestOutput] = []
        self._num_unmerged = 0
        """Number of trailing pieces that are not merged yet."""

    @property
    def id(self) -> int:
        """The id under which it was last sent to an engine."""
        return self.request.id

    @property
    def times(self) -> EngineTimes:
        """Its engine and its timings, including earlier engines."""
        return self.request.times

    # -- for the router's shell ------------------------------------------------------------------

    def put(self, output: RequestOutput) -> None:
        """Add the output of one step."""
        self._pieces.append(output)
        self._num_unmerged += 1
        if self._num_unmerged == _MERGE_COUNT:
            self._pieces[-_MERGE_COUNT:] = [merge(self._pieces[-_MERGE_COUNT:])]
            self._num_unmerged = 0
        self.finished = output.finish_reason is not None
        self.unread.arrived(self, output)

    def fail(self, error: Exception) -> None:
        """End the stream with an error."""
        self.finished = True
        self.unread.fail(error)

    # -- for the HTTP layer ----------------------------------------------------------------------

    def take(self) -> tuple[RequestOutput, bool]:
        """Return the oldest piece, and whether there are more."""
        pieces = self._pieces
        if self._num_unmerged < len(pieces):
            return pieces.pop(0), bool(pieces)
        self._pieces, self._num_unmerged = [], 0
        return pieces[0] if len(pieces) == 1 else merge(pieces), False

    async def next(self) -> RequestOutput:
        """Wait for and return the next output of a sequence that is read by itself.

        The output with a `finish_reason` is the last one.

        Raises:
            NoEngineAvailable: the engine was lost and no other can take over the request.
            KillsEngines: the request is, or must be assumed to be, the cause.
            ReaderTooSlow: outputs were unread for too long, so the request was aborted.
        """
        [(_, output)] = await self.unread.next()
        return output

    def close(self) -> None:
        """Drop the request, aborting it if it has not finished; idempotent."""
        self._on_close(self)


def weight(output: RequestOutput) -> int:
    """Return the weight of an output in tokens; scores weigh as much as the tokens they name."""
    count = len(output.token_ids)
    if output.logprobs:
        count += sum(2 + len(each.top_ids) for each in output.logprobs)
    return count


def merge(outputs: list[RequestOutput]) -> RequestOutput:
    """Merge consecutive outputs of one request into one, without timings."""
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
