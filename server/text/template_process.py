"""A process that renders chat templates of requests: `python -m server.text.template_process`.

Templates are programs. Jobs and answers are MessagePack.
"""

import functools

import msgspec

from server.helper_process import serve
from server.limits import MAX_TEMPLATE_MEMORY, MAX_TEMPLATE_OUTPUT, MAX_TEMPLATE_SECONDS
from server.text.chat_template import ChatTemplate, Rendering


class Job(msgspec.Struct, frozen=True):
    """A template, and what to render with it: the first of several that it accepts."""

    source: str
    special_tokens: dict[str, str]
    attempts: list[Rendering]


class Rendered(msgspec.Struct, frozen=True):
    """The result of a job: a text, or why there is none."""

    text: str = ""
    error: str = ""


@functools.lru_cache(maxsize=16)
def _compiled(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens))


def render(job: Job) -> Rendered:
    """Return the result of a job."""
    try:
        text = _compiled(job.source, tuple(job.special_tokens.items())).render(*job.attempts)
    except (ValueError, MemoryError, RecursionError) as failure:
        return Rendered(error=(str(failure) or type(failure).__name__)[:500])
    if len(text) > MAX_TEMPLATE_OUTPUT:
        return Rendered(error=f"it wrote more than {MAX_TEMPLATE_OUTPUT} characters")
    return Rendered(text)


def _answer(job: bytes) -> bytes:
    return msgspec.msgpack.encode(render(msgspec.msgpack.decode(job, type=Job)))


if __name__ == "__main__":
    serve(
        _answer, MAX_TEMPLATE_MEMORY, 2 * MAX_TEMPLATE_SECONDS
    )  # in case the parent does not end it
