"""Outputs of a request's sequences that nobody has read yet, within what one request may hold."""

from collections import deque

import msgspec

from engine.shared.messages import RequestOutput
from server.access.limits import MAX_UNREAD
from server.router.token_stream import merge, weight

_MERGED = 64
"""Outputs of a sequence that become one."""
_TAKEN = 1024
"""Tokens and scores that are taken at a time: what is made of them takes a few milliseconds."""


def parts(output: RequestOutput) -> list[RequestOutput]:
    """Cut an output into some that are not much, all but the last without an end."""
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
    """What has arrived, sequence by sequence in order, and how much it is."""

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
        """Whether it is as much as one request may have unread."""
        return self._weight > MAX_UNREAD

    @property
    def has_room(self) -> bool:
        """Whether it is so little that those who wait to add more may go on."""
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
        """Let whoever reads know that something went wrong, once what came before is read."""
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
