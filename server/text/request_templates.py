"""Chat templates that requests bring along, rendered in a process that can be ended."""

import asyncio
from collections.abc import Mapping, Sequence

import msgspec

from engine.shared.fair_threads import FairThreads
from server.helper_process import HelperProcess
from server.limits import MAX_TEMPLATE_SECONDS
from server.text.chat_template import Rendering, TemplateFailed
from server.text.template_process import Job, Rendered


class RequestTemplates:
    """Renders templates one at a time in a process, which is started for the first."""

    def __init__(self, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` maps names such as `bos_token` to text, for all templates."""
        self._special_tokens = dict(special_tokens)
        self._thread = FairThreads(1, "request templates")
        nothing = msgspec.msgpack.encode(Job("", {}, []))
        self._process = HelperProcess("server.text.template_process", nothing)

    async def render(self, source: str, attempts: Sequence[Rendering]) -> str:
        """Return what a template makes of the first conversation that it accepts.

        Raises:
            TemplateFailed: it is no template, accepts none, or takes too much time or memory.
        """
        job = msgspec.msgpack.encode(Job(source, self._special_tokens, list(attempts)))
        rendered = await asyncio.wrap_future(self._thread.submit(self._answered, job))
        if rendered.error:
            raise TemplateFailed(rendered.error)
        return rendered.text

    def _answered(self, job: bytes) -> Rendered:
        try:
            answer = self._process.answer(job, MAX_TEMPLATE_SECONDS)
        except OSError as error:
            return Rendered(error=str(error))
        if answer is None:
            return Rendered(error=f"it took more than {MAX_TEMPLATE_SECONDS:g} seconds, or memory")
        return msgspec.msgpack.decode(answer, type=Rendered)
