"""A process that renders chat templates of requests: `python -m server.text.template_process`.

Templates are programs. In a process of their own they can be stopped, run out of memory alone, and
find nothing of the server's. A job is read from standard input and answered on standard output,
each a length in four bytes and that many of MessagePack.
"""

import functools
import os
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

import msgspec

from server.access.limits import MAX_TEMPLATE_MEMORY, MAX_TEMPLATE_OUTPUT, MAX_TEMPLATE_SECONDS
from server.text.chat_template import ChatTemplate, TemplateFailed

LENGTH = struct.Struct(">I")
_NICE = 5


class Rendering(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `ChatTemplate.render`."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    arguments: dict[str, Any] | None = None


class Job(msgspec.Struct, frozen=True):
    """A template, and what to render with it: the first of several that it accepts."""

    source: str
    special_tokens: dict[str, str]
    attempts: list[Rendering]


class Rendered(msgspec.Struct, frozen=True):
    """What came of a job: a text, or why there is none."""

    text: str = ""
    error: str = ""


@functools.lru_cache(maxsize=16)
def _compiled(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens))


def render(job: Job) -> Rendered:
    """Return what comes of a job."""
    error = "there is nothing to render"
    try:
        template = _compiled(job.source, tuple(job.special_tokens.items()))
        for attempt in job.attempts:
            try:
                text = template.render(**msgspec.structs.asdict(attempt))
            except TemplateFailed as failure:
                error = str(failure)
                continue
            if len(text) > MAX_TEMPLATE_OUTPUT:
                return Rendered(error=f"it wrote more than {MAX_TEMPLATE_OUTPUT} characters")
            return Rendered(text)
    except (ValueError, MemoryError, RecursionError) as failure:
        error = str(failure) or type(failure).__name__
    return Rendered(error=error[:500])


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return what the next frame holds, None at the end of the stream."""
    header = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(header)[0]) if len(header) == LENGTH.size else None


def frame(content: bytes) -> bytes:
    """Return a frame of so much content."""
    return LENGTH.pack(len(content)) + content


def main() -> None:
    """Answer jobs until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it ends it
    resource.setrlimit(resource.RLIMIT_AS, (MAX_TEMPLATE_MEMORY, MAX_TEMPLATE_MEMORY))
    os.nice(_NICE)
    while (content := read_frame(sys.stdin.buffer)) is not None:
        signal.setitimer(signal.ITIMER_REAL, 2 * MAX_TEMPLATE_SECONDS)  # if nobody else ends it
        rendered = render(msgspec.msgpack.decode(content, type=Job))
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(frame(msgspec.msgpack.encode(rendered)))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
