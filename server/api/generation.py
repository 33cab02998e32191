"""What the endpoints that generate have in common: one way from a body to the engines, and back.

A body is parsed into a request (`server.generate.request`), admitted, and made into a
specification, which runs; what comes of it is folded into deltas, which a renderer shows.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from server.access.admission import BYTES_PER_TOKEN
from server.access.tenants import Wishes
from server.api.context import Context
from server.api.purpose import check_generates
from server.api.shared.answer import Usage
from server.api.shared.rendering import Answering, Renderer, TimedLater
from server.generate.beam_run import BeamRun
from server.generate.best_of import BestOf
from server.generate.fold import Delta
from server.generate.request import GenerationRequest, Limits
from server.generate.run import Output, Run, Sender
from server.generate.specification import GenerationSpec, specify
from server.http.call import Call, CancelOnDisconnect, foreseen
from server.http.errors import ApiError, timed_out
from server.observe.tracing import EndedRequest
from server.router.generation_client import NoEngineAvailable


class GenerationBody(Protocol):
    """What the bodies of all these endpoints have."""

    @property
    def model(self) -> str | None: ...

    @property
    def request_id(self) -> str | None: ...


BeforeEnd = Callable[[Usage], Awaitable[None]]

B = TypeVar("B", bound=GenerationBody)


async def generate(
    call: Call,
    context: Context,
    body: B,
    parse: Callable[[B, Limits], GenerationRequest],
    renderer: Callable[[B, Answering], Renderer],
    before_end: BeforeEnd | None = None,
) -> None:
    """Answer a request for generated text.

    Args:
        call: the request over HTTP.
        context: of this process.
        body: what was sent.
        parse: makes the endpoint's bodies into requests.
        renderer: makes what shows the answers as the endpoint does.
        before_end: awaited when everything was generated, before the client is told so.

    Raises:
        ApiError: the request is wrong, or time was up before an answer had begun.
        ClientDisconnected: everything was aborted.
        Overloaded: there is no room for it.
        GenerationFailed, NoEngineAvailable: before an answer has begun.
    """
    call.request_id = body.request_id or call.request_id
    model, adapter = context.asked_model(body.model)
    answering = _generate(call, context, body, parse, renderer, before_end, model, adapter)
    if not adapter:
        await answering
        return
    context.client.adapters.lease(adapter)
    try:
        await answering
    finally:
        context.client.adapters.release(adapter)


async def _generate(
    call: Call,
    context: Context,
    body: B,
    parse: Callable[[B, Limits], GenerationRequest],
    renderer: Callable[[B, Answering], Renderer],
    before_end: BeforeEnd | None,
    model: str,
    adapter: str,
) -> None:
    served = context.model
    check_generates(context)
    limits = Limits(context.client.max_model_len, context.max_logprobs, served.tokenizer.vocab_size)
    request = parse(body, limits)
    try:
        fields, size = request.fields, request.size
        wishes = Wishes(fields.user, fields.priority, call.pins_rank, fields.cache_salt)
        cache_root = admit(call, context, wishes, size.prompts, size.copies)
        spec = await specify(request, call.request_id, served, limits)
    except ApiError as error:
        if request.blame is None:
            raise
        raise request.blame(error) from error
    alone = spec.beams is None and len(spec.prompts) * spec.best_of == 1
    timed = TimedLater() if context.shows_timing and alone else None
    answering = Answering(
        call.request_id, model, int(time.time()), spec, context.table, context.force_usage, timed
    )
    answer = AnswerOutput(call, renderer(body, answering), before_end, timed)
    await _run(call, context, spec, cache_root, adapter, answer)


def admit(call: Call, context: Context, wishes: Wishes, prompts: int, copies: int) -> bytes:
    """Reserve a place for a call until it ends; return what sets its cached prefixes apart.

    It has so many prompts, and so many sequences of each.

    Raises:
        ApiError: it asks for what the operator does not allow.
        NoEngineAvailable: nothing can serve now.
        Overloaded: the queue is full.
    """
    call.tenant, cache_root = context.tenancy.admit(call.tenant, wishes, prompts, copies)
    if not context.client.takes_requests:
        raise NoEngineAvailable("No engine can serve now; try again.")
    tokens = copies * len(call.body) // BYTES_PER_TOKEN
    call.reservation = context.admission.reserve(
        prompts * copies, tokens, call.arrived, call.tenant.place
    )
    return cache_root


async def _run(
    call: Call,
    context: Context,
    spec: GenerationSpec,
    cache_root: bytes,
    adapter: str,
    answer: "AnswerOutput",
) -> None:
    reservation = call.reservation
    sender = Sender(
        arrived=call.arrived,
        pinned_rank=call.pinned_rank,
        reservation=reservation,
        tenant=call.tenant.id,
        cache_root=cache_root,
        adapter=adapter,
        shows_cached=context.tenancy.shows_cached_tokens,
    )
    if reservation is not None:
        reservation.recount(spec.num_tokens_sent, time.monotonic())
    output: Output = answer
    if spec.best_of > spec.n and spec.beams is None:
        output = BestOf(output, len(spec.prompts), spec.n, spec.best_of)
    with CancelOnDisconnect(call.receive):
        engines = context.client, context.table, context.metrics
        run = (
            Run(spec, sender, *engines)
            if spec.beams is None
            else BeamRun(spec, spec.beams, sender, *engines)
        )
        if answer.timed is not None and isinstance(run, Run):
            answer.timed.by = run
        try:
            await _in_time(run, output, call, context.request_timeout)
        except Exception as error:
            run.close("error")
            if call.status is None or not answer.streams:
                raise
            await answer.fail(foreseen(error, call.request_id))
        finally:
            run.close()
            if adapter or call.key.name:
                usage = run.usage()
                tokens = usage.prompt_tokens, usage.completion_tokens
                context.metrics.key_used(call.key.name, *tokens)
                if adapter:
                    context.metrics.adapter_used(context.client.adapters.name(adapter), *tokens)
            if context.tracer is not None:
                context.tracer.record(_ended(call, context, spec, run))


async def _in_time(run: Run | BeamRun, output: Output, call: Call, most: float | None) -> None:
    """Run within so many seconds of the call's arrival.

    Raises:
        ApiError: it took longer.
    """
    if most is None:
        await run.push_to(output)
        return
    try:
        async with asyncio.timeout(call.arrived + most - time.monotonic()):
            await run.push_to(output)
    except TimeoutError:
        raise timed_out(f"The request took longer than {most:g} s.") from None


class AnswerOutput:
    """What a renderer shows, sent as it comes: everything new in one send.

    The answer begins with the first delta: what goes wrong before it is an ordinary error answer,
    what goes wrong later an error event.
    """

    def __init__(
        self,
        call: Call,
        renderer: Renderer,
        before_end: BeforeEnd | None,
        timed: TimedLater | None = None,
    ) -> None:
        self.timed = timed
        """Whose times are shown, if any are."""
        self._call = call
        self._renderer = renderer
        self._before_end = before_end

    @property
    def streams(self) -> bool:
        """Whether this is a stream."""
        return self._renderer.streams

    async def fail(self, error: ApiError) -> None:
        """End a stream that has begun with an error event."""
        await self._call.send_events(self._renderer.error(error), more=False)

    async def push(self, deltas: Sequence[tuple[int, Delta]], usage: Usage | None) -> None:
        """Show deltas; with `usage` they are the last."""
        call, renderer = self._call, self._renderer
        if len(deltas) == 1:
            shown = renderer.push(*deltas[0])
        else:
            shown = b"".join([renderer.push(index, delta) for index, delta in deltas])
        if usage is not None and self._before_end is not None:
            await self._before_end(usage)
        if renderer.streams:
            if usage is not None:
                shown += renderer.finish(usage)
            await call.send_events(shown, more=usage is None)
        elif usage is not None:
            if renderer.large:
                await call.send_json(200, await asyncio.to_thread(renderer.finish, usage))
            else:
                await call.send_json(200, renderer.finish(usage))


def _ended(call: Call, context: Context, spec: GenerationSpec, run: Run | BeamRun) -> EndedRequest:
    usage, failure = run.usage(), sys.exception()
    error = None if failure is None else type(failure).__name__
    if isinstance(failure, asyncio.CancelledError):
        error = "disconnected"
    elif "error" in run.finish_reasons:
        error = error or "timeout"
    return EndedRequest(
        operation="text_completion" if call.path == "/v1/completions" else "chat",
        request_id=call.request_id,
        model=context.names[0],
        carrier=call.trace_context,
        sampling=spec.sampling,
        n=spec.n,
        arrived=call.arrived,
        first_token=run.first_token,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=run.cached_tokens,
        completion_tokens=usage.completion_tokens,
        finish_reasons=run.finish_reasons,
        error=error,
    )
