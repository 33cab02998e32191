"""One way to the engines and back for the endpoints that return vectors or scores."""

import base64
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec
from fastapi import Response

from server.api.generation import admit, in_time, unsuitable
from server.api.services import Services
from server.errors import ApiError, invalid_field
from server.generate.pooling.inputs import Length, PoolingInput, PoolingModel
from server.generate.pooling.run import UNSAMPLED, PoolingRequest, PoolingRun
from server.http.call import Call, CancelOnDisconnect, Pushed
from server.observe.tracing import EndedRequest
from server.schema.pooling import Input, PoolingFields, PoolingUsage

_LACKS = {"embed": "makes no embeddings", "classify": "has no classes"}

T = TypeVar("T")


class PooledCall:
    """One request at a model that makes vectors, from its checks to its last vector."""

    def __init__(self, call: Call, services: Services, body: PoolingFields) -> None:
        """Check what all these requests have in common.

        Raises:
            ApiError: there is no such model, or it generates, or a field is wrong.
        """
        call.request_id = body.request_id or call.request_id
        self.name = services.model_name(body.model)
        self._call = call
        self._services = services
        self._body = body
        self.model = _pooling_model(services)
        self.created = int(time.time())
        self.length = _length(body, services)

    @property
    def request_id(self) -> str:
        """The client's name for the request, or ours."""
        return self._call.request_id

    def wants(self, task: str) -> None:
        """Check what the model is for.

        Raises:
            ApiError: something else.
        """
        if self.model.spec.task != task:
            raise unsuitable(self.name, _LACKS[task], self.model)

    def admit(self, count: int, field: str) -> None:
        """Reserve a place for `count` sequences until the call ends.

        Raises:
            ApiError: the request asks for what the operator does not allow; the sequences are
                those of `field`.
            NoEngineAvailable: nothing can serve now.
            Overloaded: the queue is full.
        """
        try:
            self._cache_root = admit(self._call, self._services, self._body, count, 1)
        except ApiError as error:
            raise error.renamed(lambda name: field if name in ("prompt", "n") else name) from error

    async def vectors(
        self, inputs: list[PoolingInput], *, dimensions: int = 0, per_token: bool = False
    ) -> list[bytes]:
        """Return one vector of each input, or those of its tokens in a row, as float32 numbers.

        Raises:
            ApiError: it took too long.
            ClientDisconnected: everything was aborted.
            GenerationFailed, NoEngineAvailable, Overloaded: as they say.
        """
        call, services = self._call, self._services
        total = sum([len(each.token_ids) for each in inputs])
        self.usage = PoolingUsage(total, total)
        if call.reservation is not None:
            call.reservation.recount(total, time.monotonic())
        request = PoolingRequest(
            request_id=call.request_id,
            inputs=inputs,
            dimensions=dimensions,
            activate=self._body.use_activation is not False,
            per_token=per_token,
            priority=self._body.priority or 0,
            arrived=call.arrived,
            pinned_rank=call.pinned_rank,
            reservation=call.reservation,
            tenant=call.tenant.id,
            cache_root=self._cache_root,
        )
        run = PoolingRun(request, services.client, services.metrics)
        with CancelOnDisconnect(call.receive):
            try:
                return await in_time(call, services, run.vectors())
            except Exception:
                run.close("error")
                raise
            finally:
                run.close()
                services.metrics.used("key", call.key.name, total, 0)
                if services.tracer is not None:
                    services.tracer.record(self._ended(total, run.cached_tokens))

    def _ended(self, tokens: int, cached: int) -> EndedRequest:
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
            cached_tokens=cached,
            completion_tokens=0,
            finish_reasons=[],
            error=None if failure is None else type(failure).__name__,
        )

    def response(
        self, payload: msgspec.Struct, field: str, items: Iterable[Iterable[bytes]]
    ) -> Response:
        """Return a success with items in an empty list of the payload, made as they are sent."""

        async def push() -> None:
            with CancelOnDisconnect(self._call.receive):
                await self._call.send_json_parts(parts(payload, field, items))

        return Pushed(push)


async def inputs_of(
    called: PooledCall, given: Input, *, prompt: str = "", add_special_tokens: bool = True
) -> list[PoolingInput]:
    """Admit a request for its inputs and return them as token ids.

    Raises:
        ApiError: one is wrong or too long; `param` is "input".
    """
    texts = [given] if isinstance(given, str) else [each for each in given if isinstance(each, str)]
    maker, length = called.model.inputs, called.length
    if texts:
        called.admit(len(texts), "input")
        return await maker.of_texts(
            [prompt + text for text in texts],
            length,
            "input",
            add_special_tokens=add_special_tokens,
        )
    ids = [each for each in given if isinstance(each, int)]
    lists = [ids] if ids else [each for each in given if isinstance(each, list)]
    called.admit(len(lists), "input")
    return maker.of_token_ids(lists, length, "input")


def numbers(vector: bytes) -> list[float]:
    """Return a vector's numbers."""
    return array("f", vector).tolist()


def shown(vector: bytes, encoding: str | None) -> "list[float] | str":
    """Return a vector as an answer shows it; base64 without making numbers of it."""
    if encoding == "base64":
        return base64.b64encode(vector).decode("ascii")
    return numbers(vector)


def items_shown(items: Iterable[T], show: Callable[[int, T], object]) -> Iterator[list[bytes]]:
    """Yield the JSON of each item, as it is shown."""
    for index, item in enumerate(items):
        yield [msgspec.json.encode(show(index, item))]


def rows(vectors: bytes, size: int) -> Iterator[list[bytes]]:
    """Yield the JSON of each of several consecutive vectors of `size` numbers."""
    for first in range(0, len(vectors), 4 * size):
        yield [msgspec.json.encode(numbers(vectors[first : first + 4 * size]))]


def parts(payload: msgspec.Struct, field: str, items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Yield the JSON of a payload with items, each in parts, in its empty list of this name."""
    opening = f'"{field}":['.encode()
    before, _, after = msgspec.json.encode(payload).partition(opening + b"]")
    yield before + opening
    for index, item in enumerate(items):
        if index:
            yield b","
        yield from item
    yield b"]" + after


def _pooling_model(services: Services) -> PoolingModel:
    """Return how the model makes vectors."""
    pooling = services.model.pooling
    if pooling is None:
        raise invalid_field(
            "model",
            f"{services.names[0]!r} generates text and makes no embeddings or scores; serve "
            "a model for that, or this one with --runner pooling",
            "model_not_suitable",
        )
    return pooling


def _length(body: PoolingFields, services: Services) -> Length:
    max_len, keep = services.client.max_model_len, body.truncate_prompt_tokens
    if keep is not None and (keep == 0 or keep > max_len):
        raise invalid_field("truncate_prompt_tokens", f"must be -1 or from 1 to {max_len}")
    return Length(max_len, max_len if keep == -1 else keep, body.truncation_side != "left")
