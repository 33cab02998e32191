"""Chat templates sent in requests, rendered in a process that can be killed.

Templates are programs. The process is `python -m server.text.request_templates`.
"""

import asyncio
import functools
from collections.abc import Mapping, Sequence

import msgspec

from engine.shared.fair_threads import FairThreads
from server.helper_process import HelperProcess, serve
from server.limits import MAX_TEMPLATE_MEMORY, MAX_TEMPLATE_OUTPUT, MAX_TEMPLATE_SECONDS
from server.text.chat_template import ChatTemplate, Rendering, TemplateFailed


class Job(msgspec.Struct, frozen=True):
    """A template, and the renderings to try in order."""

    source: str
    special_tokens: dict[str, str]
    attempts: list[Rendering]


class Rendered(msgspec.Struct, frozen=True):
    """The result of a job: the text, or an error."""

    text: str = ""
    error: str = ""


@functools.lru_cache(maxsize=16)
def _compiled(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens))


def render(job: Job) -> Rendered:
    """Run a job."""
    try:
        text = _compiled(job.source, tuple(job.special_tokens.items())).render(*job.attempts)
    except (ValueError, MemoryError, RecursionError) as failure:
        return Rendered(error=(str(failure) or type(failure).__name__)[:500])
    if len(text) > MAX_TEMPLATE_OUTPUT:
        return Rendered(error=f"it wrote more than {MAX_TEMPLATE_OUTPUT} characters")
    return Rendered(text)


class RequestTemplates:
    """Renders templates one at a time in a child process, started on first use."""

    def __init__(self, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` maps names such as `bos_token` to text, for all templates."""
        self._special_tokens = dict(special_tokens)
        self._thread = FairThreads(1, "request templates")
        nothing = msgspec.msgpack.encode(Job("", {}, []))
        self._process = HelperProcess("server.text.request_templates", nothing)

    async def render(self, source: str, attempts: Sequence[Rendering]) -> str:
        """Return the text of the first rendering that the template accepts.

        Raises:
            TemplateFailed: it is not a template, accepts none, or takes too much time or memory.
            OSError: the process could not be started.
        """
        job = msgspec.msgpack.encode(Job(source, self._special_tokens, list(attempts)))
        rendered = await asyncio.wrap_future(self._thread.submit(self._answered, job))
        if rendered.error:
            raise TemplateFailed(rendered.error)
        return rendered.text

    def _answered(self, job: bytes) -> Rendered:
        answer = self._process.answer(job, MAX_TEMPLATE_SECONDS)
        if answer is None:
            return Rendered(error=f"it took more than {MAX_TEMPLATE_SECONDS:g} seconds, or memory")
        return msgspec.msgpack.decode(answer, type=Rendered)


if __name__ == "__main__":

    def answer(job: bytes) -> bytes:
        """Run one job."""
        return msgspec.msgpack.encode(render(msgspec.msgpack.decode(job, type=Job)))

    # A limit here too, in case the parent does not kill this process.
    serve(answer, MAX_TEMPLATE_MEMORY, 2 * MAX_TEMPLATE_SECONDS)
