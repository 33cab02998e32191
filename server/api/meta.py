"""Models, health, version and metrics: information about the server."""

import asyncio
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Header, Response
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder

from engine.shared.messages import ControlQuery
from engine.shared.version import PROTOCOL_VERSION, SWELL_VERSION
from server.api.openapi import errors, text_responses
from server.api.route import ApiRoute, OperatorRoute
from server.api.services import Services, ServicesDep
from server.config.display import without_secrets
from server.control import SupervisorTimeout
from server.errors import ApiError, model_not_found, unavailable
from server.observe.metric_factory import open_metrics, text_of
from server.observe.metrics import CONTENT_TYPE

Accept = Annotated[str, Header(include_in_schema=False)]


class Model(msgspec.Struct):
    """A name that the served model answers to."""

    id: str
    created: int
    owned_by: str
    root: str
    max_model_len: int | None
    parent: str | None = None
    tool_call_parser: str | None = None
    """Format in which the model's tool calls are parsed; None for models of other servers."""
    reasoning_parser: str | None = None
    object: Literal["model"] = "model"


class ModelList(msgspec.Struct):
    """All served names."""

    data: list[Model]
    object: Literal["list"] = "list"


class HealthResponse(msgspec.Struct):
    """Liveness or readiness status."""

    status: str


class LoadResponse(msgspec.Struct):
    """Load accepted by the front ends of this node, in the shape of vLLM's servers."""

    server_load: int
    """Unfinished sequences."""
    server_load_tokens: int
    """Their prompt tokens that have not been computed."""


class ServerInfo(msgspec.Struct):
    """The server's effective configuration."""

    version: str
    config: dict[str, Any]
    """Settings by section, without secrets."""


class TokenizerInfo(msgspec.Struct):
    """Properties of the served tokenizer."""

    vocab_size: int
    eos_token_ids: list[int]
    special_tokens: list[str]
    chat_template: str | None
    max_model_len: int | None
    tokenizer_class: str = "PreTrainedTokenizerFast"
    """Class name in transformers for a tokenizer loaded from tokenizer.json, as all here are."""


class VersionResponse(msgspec.Struct):
    """Versions of the distribution and of the message protocol between its processes."""

    version: str
    protocol: int


WITHIN = 1.0
"""Seconds that a scrape waits for the supervisor's response."""

router = APIRouter(route_class=ApiRoute)
tokenizer_router = APIRouter(route_class=ApiRoute)
"""Mounted with --enable-tokenizer-info-endpoint."""
settings_router = APIRouter(route_class=OperatorRoute)
"""Mounted if an admin key is set."""


@router.get("/v1/models", responses=errors(401))
async def list_models(services: ServicesDep) -> ModelList:
    """List the served model's names, adapters, and the models of other servers."""
    return ModelList(list(_models(services).values()))


@router.get("/v1/models/{model_id:path}", responses=errors(401, 404))
async def retrieve_model(model_id: str, services: ServicesDep) -> Model:
    """Show one model name."""
    models = _models(services)
    if model_id not in models:
        raise model_not_found(model_id, models)
    return models[model_id]


@router.get("/health")
async def health() -> HealthResponse:
    """Report that this process is alive."""
    return HealthResponse("ok")


@router.get("/ping", responses=errors(503))
@router.post("/ping", responses=errors(503))
async def ping(services: ServicesDep) -> HealthResponse:
    """Report whether at least one engine is ready, under the path that model hosts probe."""
    return await ready(services)


@router.get("/ready", responses=errors(503))
async def ready(services: ServicesDep) -> HealthResponse:
    """Report whether at least one engine is ready."""
    if not services.client.ready:
        raise unavailable("No engine is ready to serve.")
    return HealthResponse("ready")


@router.get("/version")
async def version() -> VersionResponse:
    """Return the version of Swell."""
    return VersionResponse(SWELL_VERSION, PROTOCOL_VERSION)


@router.get("/load", responses=errors(401))
async def load(services: ServicesDep) -> LoadResponse:
    """Return the load that the front ends of this node have accepted."""
    totals = services.admission.table.totals()
    return LoadResponse(totals.requests, totals.tokens)


@settings_router.get("/server_info")
async def server_info(services: ServicesDep) -> ServerInfo:
    """Show the settings of this front end."""
    settings = without_secrets(msgspec.to_builtins(services.config))
    return ServerInfo(SWELL_VERSION, settings)


@tokenizer_router.get("/tokenizer_info", responses=errors(401))
async def tokenizer_info(services: ServicesDep) -> TokenizerInfo:
    """Show the special tokens, the vocabulary size and the chat template."""
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
async def metrics(services: ServicesDep, accept: Accept = "") -> Response:
    """Return the node's metrics in Prometheus text format, or in OpenMetrics if accepted."""
    text, waiting = await asyncio.gather(services.scrape.result(), waiting_engines(services))
    return _exposition(text + waiting, accept)


@router.get("/metrics/engine/{rank}", responses=text_responses() | errors(400, 401, 404))
async def engine_metrics(rank: int, services: ServicesDep, accept: Accept = "") -> Response:
    """Return the metrics of a single engine, in the format of `/metrics`."""
    text = services.metrics.render_engine(services.client, rank)
    if text is None:
        raise ApiError(404, f"There is no engine {rank}.", param="rank", code="not_found")
    return _exposition(text, accept)


def _exposition(text: bytes, accept: str) -> Response:
    _, content_type = choose_encoder(accept)
    if content_type.startswith("application/openmetrics-text"):
        return Response(open_metrics(text), headers={"content-type": content_type})
    return Response(text, media_type=CONTENT_TYPE)


def _models(services: Services) -> dict[str, Model]:
    found = {name: _model(services, name) for name in services.names}
    for name, path in services.client.adapters.served.items():
        found.setdefault(name, _model(services, name, path))
    for name in services.forwarder.models if services.forwarder is not None else ():
        found.setdefault(name, Model(name, services.created, "swell", name, None))
    return found


def _model(services: Services, name: str, path: str | None = None) -> Model:
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
    """Return the metric of engines that wait for cluster resources; empty if none does.

    Only the supervisor knows about engines that have not started yet.
    """
    control = services.control
    if control is None or not control.engines_may_wait:
        return b""
    try:
        async with asyncio.timeout(WITHIN):
            status = await control.call(ControlQuery())
    except (SupervisorTimeout, TimeoutError):
        return b""
    if not status.waiting:
        return b""
    text = "1 for each engine that is not started because the cluster lacks these resources."
    name = services.config.http.metrics_prefix + "engine_waiting_for_resources"
    family = GaugeMetricFamily(name, text, labels=("model_name", "engine", "resources"))
    for engine, resources in status.waiting.items():
        family.add_metric((services.names[0], engine, resources), 1.0)
    return text_of([family])
