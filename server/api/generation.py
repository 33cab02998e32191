"""What both completion endpoints do between their request and their response."""

import asyncio
import sys
import time

import msgspec

from server.api.context import Context
from server.api.shared.chunks import ChunkFrames, ChunkHead, StreamWriter, UsageSoFar, send_stream
from server.api.shared.fields import SamplingFields, Usage
from server.generate.fold import Answer
from server.generate.run import GenerationSpec, Submission
from server.http.call import Call, CancelOnDisconnect
from server.http.errors import timed_out
from server.observe.tracing import EndedRequest

_LARGE = 2000
"""Tokens and scores of answers that are made into JSON beside the event loop."""


class Whole(msgspec.Struct):
    """All answers of a request that is not streamed."""

    answers: list[Answer]
    usage: Usage

    @property
    def large(self) -> bool:
        """Whether to show it takes more than a moment."""
        size = sum(answer.size for answer in self.answers)
        return size > _LARGE


def chunk_head(prefix: str, kind: str, call: Call, model: str) -> ChunkHead:
    """Return the head of an answer that begins now."""
    return ChunkHead(f"{prefix}-{call.request_id}", kind, int(time.time()), model)


def chunk_frames(
    request: SamplingFields, head: ChunkHead, spec: GenerationSpec, *, force_usage: bool
) -> ChunkFrames:
    """Return the frames of a stream with the options of its request."""
    options = request.stream_options
    include_usage = force_usage or (options is not None and bool(options.include_usage))
    so_far = None
    if options is not None and include_usage and options.continuous_usage_stats:
        so_far = UsageSoFar([len(prompt.token_ids) for prompt in spec.prompts], spec.n)
    return ChunkFrames(head, include_usage=include_usage, so_far=so_far)


async def _answer(call: Call, submission: Submission, writer: StreamWriter | None) -> Whole | None:
    await submission.start()
    if writer is not None:
        await send_stream(call, submission, writer)
        return None
    return Whole(await submission.collect(), submission.usage())


async def serve(
    call: Call, context: Context, spec: GenerationSpec, writer: StreamWriter | None
) -> Whole | None:
    """Generate; answer with a stream if there is a writer, else return the answers.

    Raises:
        ApiError: the header that pins the request to an engine is wrong, or time was up before an
            answer had begun.
        ClientDisconnected: everything was aborted.
        Overloaded: the prompt has more tokens than were reserved, and they do not fit.
        GenerationFailed, NoEngineAvailable: before an answer has begun.
    """
    pinned_rank = call.pinned_rank
    if call.reservation is not None:
        prompt_tokens = sum(len(prompt.token_ids) for prompt in spec.prompts)
        call.reservation.recount(spec.best_of * prompt_tokens, time.monotonic())
    with CancelOnDisconnect(call.receive):
        submission = Submission(
            context.client,
            context.table,
            context.metrics,
            spec,
            arrived=call.arrived,
            pinned_rank=pinned_rank,
            reservation=call.reservation,
            tenant=call.tenant.id,
            cache_root=context.tenancy.cache_root(call.tenant, spec.cache_salt),
            show_cached=context.tenancy.shows_cached_tokens,
        )
        try:
            if context.request_timeout is None:
                return await _answer(call, submission, writer)
            left = call.arrived + context.request_timeout - time.monotonic()
            async with asyncio.timeout(left):
                return await _answer(call, submission, writer)
        except TimeoutError:
            submission.close("error")
            late = timed_out(f"The request took longer than {context.request_timeout:g} s.")
            if call.status is None or writer is None:
                raise late from None
            await call.write(writer.error(late), more=False)
            return None
        except Exception:
            submission.close("error")
            raise
        finally:
            submission.close()
            if context.tracer is not None:
                context.tracer.record(_ended(call, context, spec, submission))


def _ended(
    call: Call, context: Context, spec: GenerationSpec, submission: Submission
) -> EndedRequest:
    usage, failure = submission.usage(), sys.exception()
    error = None if failure is None else type(failure).__name__
    if isinstance(failure, asyncio.CancelledError):
        error = "disconnected"
    elif "error" in submission.finish_reasons:
        error = error or "timeout"
    return EndedRequest(
        operation="text_completion" if call.path == "/v1/completions" else "chat",
        request_id=call.request_id,
        model=context.names[0],
        carrier=call.trace_context,
        sampling=spec.sampling,
        n=spec.n,
        arrived=call.arrived,
        first_token=submission.first_token,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=submission.cached_tokens,
        completion_tokens=usage.completion_tokens,
        finish_reasons=submission.finish_reasons,
        error=error,
    )
