"""Signs of life in streams of events that have nothing to say: load balancers cut silent ones."""

import asyncio
import time
from types import TracebackType

from server.http.call import Call

HEADERS_WITHIN = 1.0
"""Seconds of silence after which the headers of a stream go out before its first event."""


class KeepAlive:
    """While entered, a call's stream sends its headers soon, and comments while it is silent.

    Args:
        call: its answer is a stream.
        interval: seconds of silence before a comment.
    """

    def __init__(self, call: Call, interval: float) -> None:
        self._call = call
        self._interval = interval
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> None:
        self._timer = self._loop.call_later(min(HEADERS_WITHIN, self._interval), self._look)

    def _look(self) -> None:
        call, silent = self._call, 0.0
        if call.status is not None:
            silent = time.monotonic() - call.sent_at
        # A sign that is still being sent waits for a client that does not read.
        if call.sign is None and (call.status is None or silent >= self._interval):
            call.sign, silent = self._loop.create_task(call.show_life()), 0.0
        self._timer = self._loop.call_later(max(self._interval - silent, 0.1), self._look)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if self._call.sign is not None:
            self._call.sign.cancel()
