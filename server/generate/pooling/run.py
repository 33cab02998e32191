"""All sequences of one request that get vectors, from the hand-over to the last vector."""

import asyncio
from collections import deque

import msgspec

from engine.shared.messages import AddRequest, PoolingParams, SamplingParams
from server.access.admission import Reservation
from server.generate.fold import failure
from server.generate.pooling.inputs import PoolingInput
from server.observe.metrics import FrontEndMetrics
from server.observe.sequence_metrics import PromptParams, SequenceTimer
from server.router.generation_client import GenerationClient
from server.router.token_stream import RequestStream

WINDOW = 256
"""Sequences of one request that engines have at a time: others get in between."""
_SLICE = 32
"""Sequences that are handed over without a break."""

UNSAMPLED = SamplingParams(max_tokens=1, seed=0)
"""Of sequences for which no tokens are drawn."""


class PoolingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What vectors are to be made of, and how."""

    request_id: str
    inputs: list[PoolingInput]
    dimensions: int = 0
    activate: bool = True
    per_token: bool = False
    """Whether each token gets a vector."""
    priority: int = 0
    arrived: float
    """When the request came, in monotonic seconds."""
    pinned_rank: int | None
    reservation: Reservation | None
    tenant: int
    cache_root: bytes


class _Sequence(msgspec.Struct):
    stream: RequestStream
    timer: SequenceTimer
    tokens: int


class PoolingRun:
    """The sequences of one request; `close` must be called whatever happens."""

    def __init__(
        self,
        request: PoolingRequest,
        client: GenerationClient,
        metrics: FrontEndMetrics,
    ) -> None:
        """Nothing runs before `vectors`."""
        self._request = request
        self._client = client
        self._metrics = metrics
        self._waiting: deque[_Sequence] = deque()
        self._group = 0
        self.cached_tokens = 0
        """Tokens of inputs that the prefix cache had."""

    async def vectors(self) -> list[bytes]:
        """Hand every sequence to an engine; return their vectors as float32 numbers, in order.

        Raises:
            GenerationFailed: an engine gave a sequence up.
            RequestRefused: an engine cannot do what the request asks for.
            NoEngineAvailable: no engine takes a sequence, or one was lost and nothing can take it
                over.
        """
        found: list[bytes] = []
        for index, each in enumerate(self._request.inputs):
            if index % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
            if len(self._waiting) == WINDOW:
                found.append(await self._next())
            self._waiting.append(self._submit(index, each))
        while self._waiting:
            found.append(await self._next())
        return found

    def _submit(self, index: int, each: PoolingInput) -> _Sequence:
        request = self._request
        message = AddRequest(
            id=0,
            request_id=f"{request.request_id}-{index}" if index else request.request_id,
            front_end=0,
            wave=0,
            prompt_token_ids=each.token_ids,
            sampling=UNSAMPLED,
            priority=request.priority,
            tenant=request.tenant,
            cache_root=request.cache_root,
            group=self._group,
            pooling=PoolingParams(
                types_from=each.types_from,
                dimensions=request.dimensions,
                activate=request.activate,
                per_token=request.per_token,
            ),
        )
        stream = self._client.submit(message, request.pinned_rank)
        self._group = self._group or stream.id
        count = len(each.token_ids)
        timer = self._metrics.sequence(
            request.arrived, PromptParams(count, 0, 1, 1), stream.times, first=not index
        )
        return _Sequence(stream, timer, count)

    async def _next(self) -> bytes:
        """Wait for the vector of the sequence that was handed over first."""
        sequence = self._waiting[0]
        output = await sequence.stream.next()
        if output.pooled is None:
            raise failure(output)
        self._waiting.popleft()
        sequence.stream.close()
        self.cached_tokens += output.num_cached_tokens
        sequence.timer.pooled(output.num_cached_tokens)
        if self._request.reservation is not None:
            self._request.reservation.computed(sequence.tokens)
        return output.pooled

    def close(self, reason: str = "abort") -> None:
        """Abort what still runs, counting it as ended for `reason`; idempotent."""
        while self._waiting:
            sequence = self._waiting.popleft()
            sequence.stream.close()
            sequence.timer.finished(reason)
