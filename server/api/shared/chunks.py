"""Server-sent events: a submission's deltas as frames, written as they come."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from server.api.shared.fields import UNSET, Usage
from server.generate.fold import Delta
from server.generate.run import Submission
from server.http.call import Call, foreseen
from server.http.errors import ApiError

DONE = b"data: [DONE]\n\n"

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

_encode = msgspec.json.Encoder().encode


class ChunkHead(msgspec.Struct):
    """What is the same in all chunks of a stream."""

    id: str
    object: str
    created: int
    model: str


class UsageSoFar:
    """Counts the tokens of each choice of a stream."""

    def __init__(self, prompt_tokens: Sequence[int], choices: int) -> None:
        """`prompt_tokens` are those of each prompt, `choices` how many each prompt has."""
        self._prompt_tokens = prompt_tokens
        self._choices = choices
        self._counts: dict[int, int] = {}

    def add(self, index: int, tokens: int) -> None:
        """Count tokens of a choice."""
        self._counts[index] = self._counts.get(index, 0) + tokens

    def of(self, index: int) -> Usage:
        """Return the usage of a choice so far."""
        prompt, count = self._prompt_tokens[index // self._choices], self._counts.get(index, 0)
        return Usage(prompt, count, prompt + count, UNSET)


class ShownChoice(Protocol):
    """What a chunk shows of a choice."""

    index: int


class ChunkFrames:
    """Frames of one stream: only the choice is encoded, what surrounds it is ready bytes."""

    def __init__(
        self, head: ChunkHead, *, include_usage: bool, so_far: UsageSoFar | None = None
    ) -> None:
        """With `so_far` every chunk tells the usage of its choice."""
        self._so_far = so_far
        self._include_usage = include_usage
        self._prefix = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._suffix = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def count(self, index: int, delta: Delta) -> None:
        """Note a delta of a choice before anything of it is shown."""
        if self._so_far is not None:
            self._so_far.add(index, len(delta.token_ids))

    def choice(self, choice: ShownChoice, prompt_token_ids: Sequence[int] | None = None) -> bytes:
        """Return the frame of a chunk with one choice, and of the prompt if there is one."""
        if self._so_far is None and prompt_token_ids is None:
            return self._prefix + _encode(choice) + self._suffix
        more: dict[str, object] = {}
        if prompt_token_ids is not None:
            more["prompt_token_ids"] = prompt_token_ids
        if self._so_far is not None:
            more["usage"] = self._so_far.of(choice.index)
        elif self._include_usage:
            more["usage"] = None
        return self._prefix + _encode(choice) + b"]," + _encode(more)[1:] + b"\n\n"

    def end(self, usage: Usage) -> bytes:
        """Return the last frames; a chunk without choices has the usage if that is wanted."""
        if not self._include_usage:
            return DONE
        return self._prefix + b'],"usage":' + _encode(usage) + b"}\n\n" + DONE

    def error(self, error: ApiError) -> bytes:
        """Return the last frames of a stream that ends with an error."""
        return b"data: " + error.body() + b"\n\n" + DONE


class StreamWriter(Protocol):
    """An endpoint's way to show the deltas of its answer."""

    def write(self, index: int, delta: Delta) -> bytes:
        """Return the frames of a delta; none if it shows nothing."""
        ...

    def end(self, usage: Usage) -> bytes:
        """Return the frames behind those of the last delta."""
        ...

    def error(self, error: ApiError) -> bytes:
        """Return the last frames of a stream in which something went wrong."""
        ...


async def send_stream(call: Call, submission: Submission, writer: StreamWriter) -> None:
    """Answer with a stream, everything available in one send each.

    The answer begins with the first delta: what goes wrong before it is an ordinary error
    answer, what goes wrong later an error event.
    """
    deltas = await submission.next()
    await call.start(200, list(_HEADERS))
    try:
        while True:
            frames = b"".join([writer.write(index, delta) for index, delta in deltas])
            if submission.done:
                break
            if frames:
                await call.write(frames, more=True)
            deltas = await submission.next()
        frames += writer.end(submission.usage())
    except Exception as error:
        submission.close("error")
        frames = writer.error(foreseen(error, call.request_id))
    await call.write(frames, more=False)
