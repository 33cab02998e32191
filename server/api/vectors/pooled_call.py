"""The shared path of the vector and score endpoints, to the engines and back."""

import asyncio
import base64
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec
from fastapi import Response

from engine.shared.messages import AddRequest, PoolingParams, SamplingParams
from server.api.generation import admit, unsuitable, with_timeout
from server.api.services import Services
from server.api.vectors.schema import (
    ClassifyRequest,
    EmbeddingsRequest,
    PoolingFields,
    PoolingUsage,
)
from server.errors import ApiError, invalid_field
from server.generate.fold import failure
from server.generate.pooling import Length, PoolingInput
from server.http.call import Call, Pushed
from server.observe.sequence_metrics import PromptParams, SequenceTimer
from server.observe.tracing import EndedRequest
from server.router.token_stream import RequestStream

_LACKS = {"embed": "makes no embeddings", "classify": "has no classes"}

WINDOW = 256
"""Maximum sequences of one request in the engines at a time, so that requests can interleave."""
_SLICE = 32
"""Sequences submitted before yielding to the event loop."""

UNSAMPLED = SamplingParams(max_tokens=1, seed=0)
"""Sampling parameters of sequences for which no tokens are sampled."""

T = TypeVar("T")


class _Sequence(msgspec.Struct):
    stream: RequestStream
    timer: SequenceTimer
    tokens: int


class PooledCall:
    """One request to a pooling model, from validation to the last vector."""

    def __init__(self, call: Call, services: Services, body: PoolingFields) -> None:
        """Run the checks common to these requests.

        Raises:
            ApiError: the model does not exist or generates text, or a field is invalid.
        """
        call.request_id = body.request_id or call.request_id
        self.name = services.model_name(body.model)
        self._call = call
        self._services = services
        self._body = body
        self.created = int(time.time())
        self._waiting: deque[_Sequence] = deque()
        """Sequences submitted to engines, oldest first."""
        self._group = 0
        self._cached_tokens = 0
        model = services.model.pooling
        if model is None:
            raise invalid_field(
                "model",
                f"{services.names[0]!r} generates text and makes no embeddings or scores; serve a "
                "model for that, or this one with --runner pooling",
                "model_not_suitable",
            )
        self.model = model
        max_len, keep = services.client.max_model_len, body.truncate_prompt_tokens
        if keep is not None and (keep == 0 or keep > max_len):
            raise invalid_field("truncate_prompt_tokens", f"must be -1 or from 1 to {max_len}")
        keep = max_len if keep == -1 else keep
        self.length = Length(max_len, keep, body.truncation_side != "left")

    @property
    def request_id(self) -> str:
        """The client's request ID, or a generated one."""
        return self._call.request_id

    def wants(self, task: str) -> None:
        """Check that the model supports a task.

        Raises:
            ApiError: it does not.
        """
        if self.model.spec.task != task:
            raise unsuitable(self.name, _LACKS[task], self.model)

    def admit(self, count: int, field: str) -> None:
        """Reserve queue space for `count` sequences until the call ends.

        Raises:
            ApiError: the request exceeds the operator's limits; the error names `field`.
            NoEngineAvailable: no engine can serve now.
            Overloaded: the queue is full.
        """
        try:
            self._cache_root = admit(self._call, self._services, self._body, count, 1)
        except ApiError as error:
            raise error.renamed(lambda name: field if name in ("prompt", "n") else name) from error

    async def vectors(
        self, inputs: list[PoolingInput], *, dimensions: int = 0, per_token: bool = False
    ) -> list[bytes]:
        """Return one vector per input, or its token vectors concatenated, as float32 bytes.

        Raises:
            ApiError: it timed out.
            ClientDisconnected: everything was aborted.
            GenerationFailed, NoEngineAvailable, Overloaded: the engines' failures, passed on.
        """
        call, services = self._call, self._services
        total = sum([len(each.token_ids) for each in inputs])
        self.usage = PoolingUsage(total, total)
        if call.reservation is not None:
            call.reservation.recount(total, time.monotonic())
        activate = self._body.use_activation is not False
        params = PoolingParams(dimensions=dimensions, activate=activate, per_token=per_token)
        with call:
            try:
                return await with_timeout(call, services, self._pooled(inputs, params))
            except Exception:
                self._abort("error")
                raise
            finally:
                self._abort("abort")
                services.metrics.used("key", call.key.name, total, 0)
                if services.tracer is not None:
                    services.tracer.record(self._ended(total))

    async def _pooled(self, inputs: list[PoolingInput], params: PoolingParams) -> list[bytes]:
        """Submit every sequence to an engine; return the vectors in order."""
        found: list[bytes] = []
        for index, each in enumerate(inputs):
            if index % _SLICE == _SLICE - 1:
                await asyncio.sleep(0)
            if len(self._waiting) == WINDOW:
                found.append(await self._next())
            self._submit(index, each, params)
        while self._waiting:
            found.append(await self._next())
        return found

    def _submit(self, index: int, each: PoolingInput, params: PoolingParams) -> None:
        call, services = self._call, self._services
        message = AddRequest(
            id=0,
            request_id=f"{call.request_id}-{index}" if index else call.request_id,
            front_end=0,
            wave=0,
            prompt_token_ids=each.token_ids,
            sampling=UNSAMPLED,
            priority=self._body.priority or 0,
            tenant=call.tenant.id,
            cache_root=self._cache_root,
            group=self._group,
            pooling=msgspec.structs.replace(params, types_from=each.types_from),
        )
        stream = services.client.submit(message, call.pinned_rank)
        self._group = self._group or stream.id
        count = len(each.token_ids)
        timer = services.metrics.sequence(
            call.arrived, PromptParams(count, 0, 1, 1), stream.times, first=not index
        )
        self._waiting.append(_Sequence(stream, timer, count))

    async def _next(self) -> bytes:
        """Wait for the vector of the sequence that was submitted first."""
        sequence = self._waiting[0]
        output = await sequence.stream.next()
        if output.pooled is None:
            raise failure(output)
        self._waiting.popleft()
        sequence.stream.close()
        self._cached_tokens += output.num_cached_tokens
        sequence.timer.pooled(output.num_cached_tokens)
        if self._call.reservation is not None:
            self._call.reservation.computed(sequence.tokens)
        return output.pooled

    def _abort(self, reason: str) -> None:
        """Abort the remaining sequences, counting them as ended for `reason`."""
        while self._waiting:
            sequence = self._waiting.popleft()
            sequence.stream.close()
            sequence.timer.finished(reason)

    def _ended(self, tokens: int) -> EndedRequest:
        call, failure = self._call, sys.exception()
        return EndedRequest(
            operation="embeddings",
            request_id=call.request_id,
            model=self._services.names[0],
            carrier=call.trace_context,
            sampling=UNSAMPLED,
            n=1,
            arrived=call.arrived,
            first_token=None,
            prompt_tokens=tokens,
            cached_tokens=self._cached_tokens,
            completion_tokens=0,
            finish_reasons=[],
            error=None if failure is None else type(failure).__name__,
        )

    def response(
        self, payload: msgspec.Struct, field: str, items: Iterable[Iterable[bytes]]
    ) -> Response:
        """Return a success whose payload list gets its items encoded while they are sent."""

        async def push() -> None:
            with self._call:
                await self._call.send_json_parts(parts(payload, field, items))

        return Pushed(push)


async def inputs_of(
    called: PooledCall, body: EmbeddingsRequest | ClassifyRequest, prompt: str = ""
) -> list[PoolingInput]:
    """Admit a request's inputs and return them as token IDs.

    Raises:
        ApiError: an input is invalid or too long; `param` is "input".
    """
    given, maker, length = body.input, called.model, called.length
    texts = [given] if isinstance(given, str) else [each for each in given if isinstance(each, str)]
    if texts:
        called.admit(len(texts), "input")
        special = body.add_special_tokens is not False
        prompted = [prompt + text for text in texts]
        return await maker.of_texts(prompted, length, "input", add_special_tokens=special)
    ids = [each for each in given if isinstance(each, int)]
    lists = [ids] if ids else [each for each in given if isinstance(each, list)]
    called.admit(len(lists), "input")
    return maker.of_token_ids(lists, length, "input")


def numbers(vector: bytes) -> list[float]:
    """Return a vector's elements."""
    return array("f", vector).tolist()


def shown(vector: bytes, encoding: str | None) -> "list[float] | str":
    """Return a vector as shown in responses; base64 is made directly from the bytes."""
    if encoding == "base64":
        return base64.b64encode(vector).decode("ascii")
    return numbers(vector)


def items_shown(items: Iterable[T], show: Callable[[int, T], object]) -> Iterator[list[bytes]]:
    """Yield the JSON of `show(index, item)` for each item."""
    for index, item in enumerate(items):
        yield [msgspec.json.encode(show(index, item))]


def rows(vectors: bytes, size: int) -> Iterator[list[bytes]]:
    """Yield the JSON of each of several consecutive vectors of `size` numbers."""
    for first in range(0, len(vectors), 4 * size):
        yield [msgspec.json.encode(numbers(vectors[first : first + 4 * size]))]


def parts(payload: msgspec.Struct, field: str, items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Yield the JSON of a payload whose empty list `field` is filled with items, each in pieces."""
    opening = f'"{field}":['.encode()
    before, _, after = msgspec.json.encode(payload).partition(opening + b"]")
    yield before + opening
    for index, item in enumerate(items):
        if index:
            yield b","
        yield from item
    yield b"]" + after
