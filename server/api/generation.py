"""Shared path of all generating endpoints, from a request body to the engines and back.

A body is parsed into a request (`server.generate.request`), which is admitted, completed with
prompts and sampling parameters, and run. Its outputs are merged into deltas, which a renderer
turns into bytes for the client.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.shared.fair_threads import tenant_id
from server.access.admission import BYTES_PER_TOKEN
from server.api.media import image_bytes, prepare_images
from server.api.messages.schema import MessagesRequest
from server.api.rendering import Renderer
from server.api.services import Services
from server.api.vectors.schema import PoolingFields
from server.errors import ApiError, invalid_field, timed_out
from server.generate.beam_run import BeamRun
from server.generate.handover import hand_over, transfer_params
from server.generate.model import ServedModel
from server.generate.pooling import PoolingModel
from server.generate.request import GenerationRequest
from server.generate.run import Run
from server.generate.specification import specify
from server.http.call import Call
from server.http.errors import client_error
from server.observe.tracing import EndedRequest
from server.schema.answer import Usage
from server.schema.fields import DrawingFields, SamplingFields
from server.text.detokenizer import TokenTable

BeforeEnd = Callable[[Usage], Awaitable[None]]

B = TypeVar("B", bound=DrawingFields | MessagesRequest)
T = TypeVar("T")


@dataclass(eq=False)
class Generation(Response, Generic[B]):
    """A response that is generated while it is sent; each send contains all new output.

    An error before the headers are sent is an ordinary error response, a later one is an event.
    Headers are sent with the first delta, or earlier (`Call.keep_alive`).
    """

    call: Call
    services: Services
    request_body: B
    parse: Callable[[B, ServedModel, int], GenerationRequest]
    """Converts the body, given the model and its maximum length in tokens."""
    renderer: Callable[[B, GenerationRequest, TokenTable], Renderer]
    """Creates the endpoint's renderer."""
    before_end: BeforeEnd | None = None
    """Awaited after generation, before the end is sent to the client."""

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        return self.generate()

    async def generate(self) -> None:
        """Generate, and send the answer over the call.

        Raises:
            ApiError: the request is invalid, or timed out before an answer started.
            ClientDisconnected: everything was aborted.
            Overloaded: the queue is full.
            GenerationFailed, NoEngineAvailable: before an answer started.
        """
        call, services = self.call, self.services
        request = await self._admitted()
        engines = services.client, services.table, services.metrics
        run = (
            Run(request, *engines)
            if request.beams is None
            else BeamRun(request, request.beams, *engines)
        )
        if isinstance(run, Run):
            call.weight_version = lambda: services.client.weight_version(run.engine)
            if request.offers_blocks:
                offers = services.client
                request.transfer_params = lambda: transfer_params(
                    request, offers.kv_offers.get(run.engine)
                )
        renderer = self.renderer(self.request_body, request, services.table)
        with call:
            if renderer.streams:
                call.keep_alive(services.config.http.sse_keep_alive)
            try:
                await with_timeout(call, services, self._show(run, renderer))
            except Exception as error:
                run.close("error")
                if call.status is None or not renderer.streams:
                    raise
                ended = renderer.error(client_error(error, call.request_id))
                await call.send_events(ended, more=False)
            finally:
                run.close()
                if request.adapter or call.key.name:
                    usage = run.usage()
                    tokens = usage.prompt_tokens, usage.completion_tokens
                    services.metrics.used("key", call.key.name, *tokens)
                    if request.adapter:
                        name = services.client.adapters.name(request.adapter)
                        services.metrics.used("lora", name, *tokens)
                if services.tracer is not None:
                    services.tracer.record(_ended(call, services, request, run))

    async def _admitted(self) -> GenerationRequest:
        """Return the completed request, with a queue place that the call holds."""
        call, services, body = self.call, self.services, self.request_body
        call.request_id = body.request_id or call.request_id
        model, adapter = services.requested_model(body.model)
        if adapter:
            services.client.adapters.lease(adapter)
            call.on_release.append(partial(services.client.adapters.release, adapter))
        if services.model.pooling is not None:
            raise unsuitable(services.names[0], "generates no text", services.model.pooling)
        request = self.parse(body, services.model, services.client.max_model_len)
        try:
            request.cache_root = admit(
                call,
                services,
                request.fields,
                request.num_prompts,
                request.best_of,
                image_bytes(request),
            )
            allowed = services.config.routing.allow_kv_transfer_params
            hand_over(request, services.client.kv_offers, allowed=allowed)
            request.tenant = call.tenant.id
            await prepare_images(request, call, services)
            await specify(request, services.model)
        except ApiError as error:
            if request.blame is None:
                raise
            raise request.blame(error) from error
        request.request_id = call.request_id
        request.model, request.adapter = model, adapter
        request.created, request.arrived = int(time.time()), call.arrived
        request.pinned_rank = call.pinned_rank
        request.reservation = call.reservation
        request.shows_cached = services.tenancy.shows_cached_tokens
        if call.reservation is not None:
            call.reservation.recount(request.num_tokens_sent, time.monotonic())
        http = services.config.http
        request.force_usage = http.enable_force_include_usage
        if request.fields.return_tokens_as_token_ids is None:
            request.fields.return_tokens_as_token_ids = http.return_tokens_as_token_ids
        request.shows_timing = http.enable_per_request_metrics and request.num_sequences == 1
        if request.plan.tools.format is not None:
            parser = services.model.formats.call_parser
            services.metrics.count("tool_call_parser_invocations", parser, by=request.num_answers)
        return request

    async def _show(self, run: Run | BeamRun, renderer: Renderer) -> None:
        """Send the output: a stream incrementally, a whole answer at the end."""
        call = self.call
        while not run.finished:
            deltas = await run.next()
            if len(deltas) == 1:
                shown = renderer.push(*deltas[0])
            else:
                shown = b"".join([renderer.push(index, delta) for index, delta in deltas])
            if not run.finished:
                if renderer.streams:
                    await call.send_events(shown, more=True)
                continue
            usage = run.usage()
            if self.before_end is not None:
                await self.before_end(usage)
            if renderer.streams:
                await call.send_events(shown + renderer.finish(usage), more=False)
            elif renderer.large:
                await call.send_json(await asyncio.to_thread(renderer.finish, usage))
            else:
                await call.send_json(renderer.finish(usage))


def with_timeout(call: Call, services: Services, running: Awaitable[T]) -> Awaitable[T]:
    """Limit an awaitable to `--request-timeout` seconds after the call's arrival.

    Raises:
        ApiError: it timed out.
    """
    seconds = services.config.guards.request_timeout
    return running if seconds is None else _limited(running, seconds, call.arrived)


async def _limited(running: Awaitable[T], seconds: float, arrived: float) -> T:
    try:
        async with asyncio.timeout(arrived + seconds - time.monotonic()):
            return await running
    except TimeoutError:
        raise timed_out(f"The request took longer than {seconds:g} s.") from None


def admit(
    call: Call,
    services: Services,
    fields: SamplingFields | PoolingFields,
    prompts: int,
    copies: int,
    image_bytes: int = 0,
) -> bytes:
    """Reserve queue space for a call until it ends; return its cache root.

    Each prompt has `copies` sequences. `image_bytes` of the body are images, whose tokens are
    counted once they are known. The cache root isolates its cached prefixes
    (`engine.shared.messages.AddRequest`).

    Raises:
        ApiError: the request exceeds the operator's limits.
        NoEngineAvailable: no engine can serve now.
        Overloaded: the queue is full.
    """
    tenancy = services.tenancy
    tenancy.check(fields.priority, pins_rank=call.pins_rank)
    tenancy.check_sequences(prompts, copies)
    call.tenant = tenancy.tenant(call.tenant, fields.user)
    tenant_id.set(call.tenant.id)
    services.client.check_accepts_requests()
    tokens = copies * max(0, len(call.content) - image_bytes) // BYTES_PER_TOKEN
    call.reservation = services.admission.reserve(
        prompts * copies, tokens, call.arrived, call.tenant.slot, call.tenant.id
    )
    return tenancy.cache_root(call.tenant, fields.cache_salt)


def _ended(
    call: Call, services: Services, request: GenerationRequest, run: Run | BeamRun
) -> EndedRequest:
    usage, failure = run.usage(), sys.exception()
    error = None if failure is None else type(failure).__name__
    if isinstance(failure, asyncio.CancelledError):
        error = "disconnected"
    elif "error" in run.finish_reasons:
        error = error or "timeout"
    return EndedRequest(
        operation="text_completion" if call.path == "/v1/completions" else "chat",
        request_id=call.request_id,
        model=services.names[0],
        carrier=call.trace_context,
        sampling=request.sampling,
        n=request.n,
        arrived=call.arrived,
        first_token=run.first_token,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=run.cached_tokens,
        completion_tokens=usage.completion_tokens,
        finish_reasons=run.finish_reasons,
        error=error,
        timing=request.timing,
        engine_periods=run.engine_periods if isinstance(run, Run) else [],
    )


_SERVES = {
    "embed": "/v1/embeddings, /score, /rerank and /pooling",
    "classify": "/classify, /score, /rerank and /pooling",
}


def unsuitable(name: str, lacks: str, pooling: PoolingModel) -> ApiError:
    """Return the error for a request that a pooling model cannot serve."""
    return invalid_field(
        "model", f"{name!r} {lacks}; it serves {_SERVES[pooling.spec.task]}", "model_not_suitable"
    )
