"""Path operations whose bodies are read under the server's limits."""

import logging
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import Response
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from server.api.body import read_body
from server.api.services import Services, services_of
from server.http.call import Call, CancelOnDisconnect, ClientDisconnected, foreseen
from server.schema.body import RequestBody

logger = logging.getLogger(__name__)


class ApiRoute(APIRoute):
    """A path operation that returns a `Response`; a JSON body is read under the server's limits.

    FastAPI matches and documents all of them and serves those without a body. The bytes of a body
    are counted and priced here before anything is made of them. Such an operation is passed its
    body, the `Call`, `ServicesDep` and the parameters of its path, which are texts, as far as it
    has them; other dependencies are not solved, which would take a tenth of a millisecond.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **{**options, "response_class": Response})
        if self.body_field is None:
            return
        dependant = self.dependant
        assert [each.call for each in dependant.dependencies] in ([], [services_of]), path
        assert not dependant.query_params + dependant.header_params, path
        assert all(each.field_info.annotation is str for each in dependant.path_params), path
        self._call_name = dependant.request_param_name
        self._services_names = [each.name for each in dependant.dependencies if each.name]
        self._body_name = self.body_field.name
        self._body_type: Any = self.body_field.field_info.annotation

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.body_field is None or scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)
            return
        services: Services = scope["app"].state.services
        call = Call(scope, receive, send, services.body_limits)
        try:
            await call.read()
            await self.answer(call, services)
        except ClientDisconnected:
            name = call.request_id
            logger.debug("request %s: the client hung up", name, extra={"request_id": name})
        except Exception as error:
            if call.status is not None:
                raise
            await call.send_error(foreseen(error, call.request_id))
        finally:
            call.release()
        if call.status is not None:
            services.metrics.count("http_requests", self.path, call.status)

    async def answer(self, call: Call, services: Services) -> None:
        """Answer a call whose bytes have been read."""
        given = {self._body_name: await self.read(call, services), **call.path_params}
        if self._call_name is not None:
            given[self._call_name] = call
        for name in self._services_names:
            given[name] = services
        response: Response = await self.endpoint(**given)
        await response(call.scope, call.receive, call.send)

    async def read(self, call: Call, services: Services) -> RequestBody:
        """Return the validated body of a call.

        Raises:
            ApiError: it is wrong.
        """
        body: RequestBody = await read_body(self._body_type, call.content)
        return body


class ModelRoute(ApiRoute):
    """An operation that needs the model: another server answers what is for its models."""

    async def answer(self, call: Call, services: Services) -> None:
        if not services.client.reaches_engines:
            with CancelOnDisconnect(call.receive):
                await services.client.wait_for_engines()
        forwarder = services.forwarder
        model = None if forwarder is None else forwarder.remote_model(call, services.own_models)
        if forwarder is None or model is None:
            await super().answer(call, services)
        else:
            await forwarder.forward(call, model)


def json_response(payload: msgspec.Struct) -> Response:
    """Return a success with a Struct."""
    return Response(msgspec.json.encode(payload), media_type="application/json")
