"""Models, health, version and metrics."""

import asyncio
import re
from typing import Any

import msgspec
from fastapi import Response

from engine.shared.version import SWELL_VERSION
from server.api.context import Context
from server.api.meta.schema import (
    HealthResponse,
    LoadResponse,
    Model,
    ModelList,
    ServerInfo,
    TokenizerInfo,
    VersionResponse,
)
from server.api.tokenize.count import known_max_model_len
from server.config import FrontEndConfig
from server.http.errors import ApiError, model_not_found, unavailable
from server.observe.metrics import CONTENT_TYPE
from server.observe.shared_work import SharedWork
from server.observe.waiting_engines import WaitingEngines


class MetaRoutes:
    """Endpoints that tell about the server."""

    def __init__(self, context: Context, config: FrontEndConfig, waiting: WaitingEngines) -> None:
        self._context = context
        self._config = config
        self._waiting = waiting
        self._scrape = SharedWork(lambda: context.metrics.scrape(context.client))

    async def list_models(self) -> Response:
        """List the names by which the model may be called, and the models of other servers."""
        names = self._context.names
        served = self._context.client.adapters.served
        adapters = [self._model(name, path) for name, path in served.items() if name not in names]
        here = [self._model(name) for name in names] + adapters
        known = {each.id for each in here}
        return _json(ModelList(here + [each for each in self._elsewhere() if each.id not in known]))

    async def retrieve_model(self, model_id: str) -> Response:
        """Show one served name."""
        if model_id in self._context.names:
            return _json(self._model(model_id))
        path = self._context.client.adapters.served.get(model_id)
        if path is not None:
            return _json(self._model(model_id, path))
        for model in self._elsewhere():
            if model.id == model_id:
                return _json(model)
        raise model_not_found(model_id)

    async def health(self) -> Response:
        """Say that this process lives."""
        return _json(HealthResponse("ok"))

    async def ping(self) -> Response:
        """Say whether at least one engine can serve, where hosts of models ask."""
        return await self.ready()

    async def ready(self) -> Response:
        """Say whether at least one engine can serve."""
        if not self._context.client.ready:
            raise unavailable("No engine is ready to serve.")
        return _json(HealthResponse("ready"))

    async def version(self) -> Response:
        """Tell the version of Swell."""
        return _json(VersionResponse(SWELL_VERSION))

    async def load(self) -> Response:
        """Tell how much the front ends of this node have taken on."""
        totals = self._context.admission.table.totals()
        return _json(LoadResponse(totals.requests, totals.tokens))

    async def server_info(self) -> Response:
        """Show the settings that this front end runs with."""
        settings = _without_secrets(msgspec.to_builtins(self._config))
        return _json(ServerInfo(SWELL_VERSION, settings))

    async def tokenizer_info(self) -> Response:
        """Show the special tokens, the vocabulary's size and the chat template."""
        tokenizer = self._context.model.tokenizer
        template = tokenizer.chat_template
        info = TokenizerInfo(
            tokenizer.vocab_size,
            sorted(tokenizer.eos_token_ids),
            list(tokenizer.special_tokens),
            None if template is None else template.source,
            known_max_model_len(self._context),
        )
        return _json(info)

    async def metrics(self) -> Response:
        """Show the node's metrics in Prometheus text format."""
        text, waiting = await asyncio.gather(self._scrape.result(), self._waiting.exposed())
        return Response(text + waiting, media_type=CONTENT_TYPE)

    async def engine_metrics(self, rank: int) -> Response:
        """Show the metrics of one engine alone."""
        context = self._context
        text = context.metrics.render_engine(context.client, rank)
        if text is None:
            raise ApiError(404, f"There is no engine {rank}.", param="rank", code="not_found")
        return Response(text, media_type=CONTENT_TYPE)

    def _elsewhere(self) -> list[Model]:
        """Return what is shown of the models of other servers."""
        forwarder = self._context.forwarder
        names = forwarder.models if forwarder is not None else ()
        return [Model(name, self._context.created, "swell", name, None) for name in names]

    def _model(self, name: str, path: str | None = None) -> Model:
        """Return what is shown of the model, or of an adapter at this path."""
        context = self._context
        return Model(
            id=name,
            created=context.created,
            owned_by="swell",
            root=context.names[0] if path is None else path,
            parent=None if path is None else context.names[0],
            max_model_len=known_max_model_len(context),
        )


_SECRET = re.compile(r"(^|_)(key|token|secret|password)s?$")
"""Names of settings whose values are not shown; paths of files that hold them are."""

_URL_SECRET = re.compile(r"://[^/?#@]*@")
"""Who logs in, in a URL."""


def _without_secrets(settings: Any) -> Any:
    if isinstance(settings, str):
        return _URL_SECRET.sub("://(hidden)@", settings)
    if not isinstance(settings, dict):
        return settings
    return {
        name: "(hidden)" if value and _SECRET.search(name) else _without_secrets(value)
        for name, value in settings.items()
    }


def _json(payload: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(payload), media_type="application/json")
