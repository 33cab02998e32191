"""What both completion endpoints do between their request and their response."""

import time

import msgspec

from server.asgi import Call, CancelOnDisconnect
from server.generation import Answer
from server.routes.context import Context
from server.schemas.common import SamplingFields, Usage
from server.sse import ChunkFrames, ChunkHead, ChunkWriter, send_stream
from server.submission import GenerationSpec, Submission


class Whole(msgspec.Struct):
    """All answers of a request that is not streamed."""

    answers: list[Answer]
    usage: Usage


def chunk_head(prefix: str, kind: str, call: Call, model: str) -> ChunkHead:
    """Return the head of an answer that begins now."""
    return ChunkHead(f"{prefix}-{call.request_id}", kind, int(time.time()), model)


def chunk_frames(request: SamplingFields, head: ChunkHead) -> ChunkFrames:
    """Return the frames of a stream with the options of its request."""
    options = request.stream_options
    return ChunkFrames(head, include_usage=options is not None and bool(options.include_usage))


async def serve(
    call: Call, context: Context, spec: GenerationSpec, writer: ChunkWriter | None
) -> Whole | None:
    """Generate; answer with a stream if there is a writer, else return the answers.

    Raises:
        ApiError: the header that pins the request to an engine is wrong.
        ClientDisconnected: everything was aborted.
        GenerationFailed, NoEngineAvailable: before an answer has begun.
    """
    pinned_rank = call.pinned_rank
    with CancelOnDisconnect(call.receive):
        submission = Submission(
            context.client,
            context.table,
            context.metrics,
            spec,
            arrived=call.arrived,
            pinned_rank=pinned_rank,
        )
        try:
            if writer is not None:
                await send_stream(call, submission, writer)
                return None
            return Whole(await submission.collect(), submission.usage())
        except Exception:
            submission.close("error")
            raise
        finally:
            submission.close()
