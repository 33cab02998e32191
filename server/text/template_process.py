"""A process that renders chat templates of requests: `python -m server.text.template_process`.

Templates are programs. Jobs and answers are MessagePack.
"""

import functools
from typing import Any

import msgspec

from server.helper_process import serve
from server.limits import MAX_TEMPLATE_MEMORY, MAX_TEMPLATE_OUTPUT, MAX_TEMPLATE_SECONDS
from server.text.chat_template import ChatTemplate, TemplateFailed


class Rendering(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `ChatTemplate.render`."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    arguments: dict[str, Any] | None = None
    images: bool = False


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


def _answer(job: bytes) -> bytes:
    return msgspec.msgpack.encode(render(msgspec.msgpack.decode(job, type=Job)))


if __name__ == "__main__":
    serve(
        _answer, MAX_TEMPLATE_MEMORY, 2 * MAX_TEMPLATE_SECONDS
    )  # in case the parent does not end it
