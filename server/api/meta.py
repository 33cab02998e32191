"""Models, health, version and metrics: what the server tells about itself."""

import asyncio
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Response
from prometheus_client.core import GaugeMetricFamily

from engine.shared.messages import ControlQuery
from engine.shared.version import PROTOCOL_VERSION, SWELL_VERSION
from server.api.openapi import errors, text_responses
from server.api.route import ApiRoute, OperatorRoute
from server.api.services import Services, ServicesDep
from server.config.shown import without_secrets
from server.control import SupervisorSilent
from server.errors import ApiError, model_not_found, unavailable
from server.observe.metric_factory import text_of
from server.observe.metrics import CONTENT_TYPE


class Model(msgspec.Struct):
    """A name by which the served model may be called."""

    id: str
    created: int
    owned_by: str
    root: str
    max_model_len: int | None
    parent: str | None = None
    tool_call_parser: str | None = None
    """The format in which the model's tool calls are read; None for models of other servers."""
    reasoning_parser: str | None = None
    object: Literal["model"] = "model"


class ModelList(msgspec.Struct):
    """All served names."""

    data: list[Model]
    object: Literal["list"] = "list"


class HealthResponse(msgspec.Struct):
    """This process lives, or takes traffic."""

    status: str


class LoadResponse(msgspec.Struct):
    """How much the front ends of this node have taken on, as vLLM's servers tell it."""

    server_load: int
    """Sequences that have not ended."""
    server_load_tokens: int
    """Prompt tokens of them that have not been computed."""


class ServerInfo(msgspec.Struct):
    """What the server runs with."""

    version: str
    config: dict[str, Any]
    """Settings by section; what is secret is not shown."""


class TokenizerInfo(msgspec.Struct):
    """What there is to know of the served tokenizer."""

    vocab_size: int
    eos_token_ids: list[int]
    special_tokens: list[str]
    chat_template: str | None
    max_model_len: int | None
    tokenizer_class: str = "PreTrainedTokenizerFast"
    """What transformers calls a tokenizer that is read from tokenizer.json, as all are here."""


class VersionResponse(msgspec.Struct):
    """Version of the distribution, and of the messages that its processes exchange."""

    version: str
    protocol: int


WITHIN = 1.0
"""Seconds that a scrape waits for the supervisor."""

router = APIRouter(route_class=ApiRoute)
tokenizer_router = APIRouter(route_class=ApiRoute)
"""What is there with --enable-tokenizer-info-endpoint."""
settings_router = APIRouter(route_class=OperatorRoute)
"""What is there with an admin key."""


@router.get("/v1/models", responses=errors(401))
async def list_models(services: ServicesDep) -> ModelList:
    """List the names by which the model may be called, and the models of other servers."""
    return ModelList(list(_models(services).values()))


@router.get("/v1/models/{model_id:path}", responses=errors(401, 404))
async def retrieve_model(model_id: str, services: ServicesDep) -> Model:
    """Show one served name."""
    models = _models(services)
    if model_id not in models:
        raise model_not_found(model_id, models)
    return models[model_id]


@router.get("/health")
async def health() -> HealthResponse:
    """Say that this process lives."""
    return HealthResponse("ok")


@router.get("/ping", responses=errors(503))
@router.post("/ping", responses=errors(503))
async def ping(services: ServicesDep) -> HealthResponse:
    """Say whether at least one engine can serve, where hosts of models ask."""
    return await ready(services)


@router.get("/ready", responses=errors(503))
async def ready(services: ServicesDep) -> HealthResponse:
    """Say whether at least one engine can serve."""
    if not services.client.ready:
        raise unavailable("No engine is ready to serve.")
    return HealthResponse("ready")


@router.get("/version")
async def version() -> VersionResponse:
    """Tell the version of Swell."""
    return VersionResponse(SWELL_VERSION, PROTOCOL_VERSION)


@router.get("/load", responses=errors(401))
async def load(services: ServicesDep) -> LoadResponse:
    """Tell how much the front ends of this node have taken on."""
    totals = services.admission.table.totals()
    return LoadResponse(totals.requests, totals.tokens)


@settings_router.get("/server_info")
async def server_info(services: ServicesDep) -> ServerInfo:
    """Show the settings that this front end runs with."""
    settings = without_secrets(msgspec.to_builtins(services.config))
    return ServerInfo(SWELL_VERSION, settings)


@tokenizer_router.get("/tokenizer_info", responses=errors(401))
async def tokenizer_info(services: ServicesDep) -> TokenizerInfo:
    """Show the special tokens, the vocabulary's size and the chat template."""
    tokenizer = services.model.tokenizer
    template = tokenizer.chat_template
    return TokenizerInfo(
        tokenizer.vocab_size,
        sorted(tokenizer.eos_token_ids),
        list(tokenizer.special_tokens),
        None if template is None else template.source,
        services.known_max_model_len,
    )


@router.get("/metrics", responses=text_responses() | errors(401))
async def metrics(services: ServicesDep) -> Response:
    """Show the node's metrics in Prometheus text format."""
    text, waiting = await asyncio.gather(services.scrape.result(), waiting_engines(services))
    return Response(text + waiting, media_type=CONTENT_TYPE)


@router.get("/metrics/engine/{rank}", responses=text_responses() | errors(400, 401, 404))
async def engine_metrics(rank: int, services: ServicesDep) -> Response:
    """Show the metrics of one engine alone."""
    text = services.metrics.render_engine(services.client, rank)
    if text is None:
        raise ApiError(404, f"There is no engine {rank}.", param="rank", code="not_found")
    return Response(text, media_type=CONTENT_TYPE)


def _models(services: Services) -> dict[str, Model]:
    """Return what is shown of the model, of adapters and of other servers' models, by name."""
    found = {name: _model(services, name) for name in services.names}
    for name, path in services.client.adapters.served.items():
        found.setdefault(name, _model(services, name, path))
    for name in services.forwarder.models if services.forwarder is not None else ():
        found.setdefault(name, Model(name, services.created, "swell", name, None))
    return found


def _model(services: Services, name: str, path: str | None = None) -> Model:
    """Return what is shown of the model, or of an adapter at this path."""
    return Model(
        id=name,
        created=services.created,
        owned_by="swell",
        root=services.names[0] if path is None else path,
        parent=None if path is None else services.names[0],
        max_model_len=services.known_max_model_len,
        tool_call_parser=services.model.formats.call_parser,
        reasoning_parser=services.model.formats.reasoning_parser,
    )


async def waiting_engines(services: Services) -> bytes:
    """Return the metric of engines that wait for resources of a cluster; empty if none does.

    Only the supervisor knows of engines that have not been started yet.
    """
    control = services.control
    if control is None or not control.engines_may_wait:
        return b""
    try:
        async with asyncio.timeout(WITHIN):
            status = await control.ask(ControlQuery())
    except (SupervisorSilent, TimeoutError):
        return b""
    if not status.waiting:
        return b""
    text = "1 for each engine that is not started because the cluster lacks these resources."
    name = services.config.http.metrics_prefix + "engine_waiting_for_resources"
    family = GaugeMetricFamily(name, text, labels=("model_name", "engine", "resources"))
    for engine, resources in status.waiting.items():
        family.add_metric((services.names[0], engine, resources), 1.0)
    return text_of([family])
