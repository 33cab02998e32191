"""A front end's connection to the supervisor of its node."""

import asyncio

import zmq

from engine.shared.messages import ControlRequest, ControlStatus, encode
from engine.shared.transport import Inbox, Transport

ANSWER_TIMEOUT = 5.0
"""Timeout in seconds for the supervisor's response."""


class SupervisorTimeout(Exception):
    """The supervisor does not respond."""


class SupervisorControl:
    """Sends requests to the supervisor, one at a time."""

    def __init__(
        self, address: str, transport: Transport, *, engines_may_wait: bool = False
    ) -> None:
        """`engines_may_wait`: whether its engines may wait for resources of a cluster."""
        self.engines_may_wait = engines_may_wait
        self._answers = Inbox(transport.connect(zmq.DEALER, address), ControlStatus, "control")
        self._lock = asyncio.Lock()
        self._waiting: asyncio.Future[ControlStatus] | None = None
        self._answers.attach(asyncio.get_running_loop(), self._answer)

    def _answer(self, _sender: bytes, status: ControlStatus) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(status)

    async def call(self, request: ControlRequest) -> ControlStatus:
        """Send a request and return the supervisor's response.

        Raises:
            SupervisorTimeout: it timed out.
        """
        async with self._lock:
            self._waiting = asyncio.get_running_loop().create_future()
            self._answers.send(encode(request))
            try:
                return await asyncio.wait_for(self._waiting, ANSWER_TIMEOUT)
            except TimeoutError:
                raise SupervisorTimeout("the supervisor does not answer") from None
            finally:
                self._waiting = None

    def close(self) -> None:
        """Close the socket."""
        self._answers.close()
