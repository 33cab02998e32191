"""Outputs of a request's sequences that are still to be read, within a bound for each request."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence

import msgspec

from engine.shared.messages import RequestOutput
from server.limits import MAX_UNREAD
from server.router.generation_client import ReaderTooSlow, TokenStream
from server.router.token_stream import merge, weight

_MERGED = 64
"""Outputs of a sequence that become one."""
_TAKEN = 1024
"""Tokens and scores that are taken at a time: rendering them takes a few milliseconds."""
_SLICE = 64
"""Streams that begin to be read at a time: some tenths of a millisecond."""
_READER_CHECK = 0.5
"""Seconds between checks whether a slow reader goes on."""


def parts(output: RequestOutput) -> list[RequestOutput]:
    """Cut a large output into smaller ones, of which only the last says how the sequence ended."""
    count = len(output.token_ids)
    if count <= _TAKEN and output.logprobs is None:
        return [output]
    step = max(1, _TAKEN * count // max(1, weight(output)))
    if count <= step:
        return [output]
    scores = output.logprobs
    cut = [
        RequestOutput(
            output.id,
            output.token_ids[first : first + step],
            logprobs=None if scores is None else scores[first : first + step],
        )
        for first in range(0, count, step)
    ]
    cut[0] = msgspec.structs.replace(
        cut[0], prompt_logprobs=output.prompt_logprobs, num_cached_tokens=output.num_cached_tokens
    )
    cut[-1] = msgspec.structs.replace(
        cut[-1],
        finish_reason=output.finish_reason,
        stop_token_id=output.stop_token_id,
        error=output.error,
    )
    return cut


class Unread:
    """What has arrived of each sequence, in order, and how much it is."""

    def __init__(self) -> None:
        self._pieces: dict[int, deque[RequestOutput]] = {}
        """Of each sequence, in the order in which they come up."""
        self._small: dict[int, int] = {}
        """Outputs at the end of a sequence's pieces that are not merged yet."""
        self._error: Exception | None = None
        self._weight = 0

    def __bool__(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._pieces) or self._error is not None

    @property
    def full(self) -> bool:
        """Whether this is more than one request may have unread."""
        return self._weight > MAX_UNREAD

    @property
    def has_room(self) -> bool:
        """Whether it is little enough for more to be added after it was full."""
        return self._weight < MAX_UNREAD // 2

    def put(self, index: int, output: RequestOutput) -> None:
        """Add an output of a sequence."""
        pieces = self._pieces.setdefault(index, deque())
        pieces.append(output)
        small = self._small.get(index, 0) + 1
        if small == _MERGED:
            newest = [pieces.pop() for _ in range(_MERGED)]
            pieces.append(merge(newest[::-1]))
            small = 0
        self._small[index] = small
        self._weight += weight(output)

    def fail(self, error: Exception) -> None:
        """Raise an error to the reader once everything before it has been read."""
        self._error = self._error or error

    def take(self) -> list[tuple[int, RequestOutput]]:
        """Return some of what there is, oldest sequences first.

        Raises:
            Exception: what the request failed with.
        """
        taken: list[tuple[int, RequestOutput]] = []
        total = 0
        while self._pieces and total < _TAKEN:
            index = next(iter(self._pieces))
            pieces = self._pieces.pop(index)
            if self._small.get(index, 0) == len(pieces):
                output = pieces[0] if len(pieces) == 1 else merge(list(pieces))
                self._small[index] = 0
            else:
                output = pieces.popleft()
                if pieces:
                    self._pieces[index] = pieces  # behind the others
            size = weight(output)
            self._weight -= size
            total += size
            taken.append((index, output))
        if not taken and self._error is not None:
            raise self._error
        return taken


class Arrivals:
    """Reads several streams at once; one that is read too slowly ends the request.

    A task per stream moves outputs from it to what is unread, until that is full.
    """

    def __init__(self, streams: Sequence[TokenStream]) -> None:
        self._streams = streams
        self._unread = Unread()
        self._arrived = asyncio.Event()
        self._taken = asyncio.Event()
        self._reading = False
        """Whether `next` is under way: then only this process is slow, not the client."""
        self._pumps: list[asyncio.Task[None]] = []

    async def next(self) -> list[tuple[int, RequestOutput]]:
        """Wait for and return some of what is new, each output with the index of its stream.

        Raises:
            Exception: what the request failed with.
        """
        self._reading = True
        await self._start_pumps()
        if self._unread:
            await asyncio.sleep(0)  # let other requests run between the parts of a large answer
        else:
            await self._arrived.wait()
        self._arrived.clear()
        self._reading = False
        outputs = self._unread.take()
        if self._unread.has_room:
            self._taken.set()
            self._taken.clear()
        return outputs

    def ended(self, index: int) -> None:
        """A sequence has ended: nothing more of it is wanted."""
        self._pumps[index].cancel()

    def close(self) -> None:
        """Stop reading; idempotent."""
        for pump in self._pumps:
            pump.cancel()

    async def _start_pumps(self) -> None:
        """Start what reads the streams, if it does not run; other requests run in between."""
        while len(self._pumps) < len(self._streams):
            if self._pumps:
                await asyncio.sleep(0)
            first = len(self._pumps)
            for index in range(first, min(first + _SLICE, len(self._streams))):
                self._pumps.append(asyncio.create_task(self._pump(index)))

    async def _pump(self, index: int) -> None:
        finished = False
        while not finished:
            try:
                output = await self._streams[index].next()
            except Exception as error:
                self._unread.fail(error)
                finished = True
            else:
                finished = output.finish_reason is not None
                self._unread.put(index, output)
            self._arrived.set()
            if self._unread.full and not finished:
                await self._wait_for_reader()

    async def _wait_for_reader(self) -> None:
        """Wait until something has been read; end the request if the client does not read."""
        while self._unread.full:
            if not self._reading:
                slow = ReaderTooSlow("The client read too slowly: the request was aborted.")
                self._unread.fail(slow)
                self.close()
                for stream in self._streams:
                    stream.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._taken.wait(), _READER_CHECK)
