"""The HTTP application: every route and handler in one list."""

import functools
import time
from typing import TYPE_CHECKING, get_args

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from engine.shared.pooling import PoolingSpec
from engine.shared.version import SWELL_VERSION
from server.access.admission import Admission
from server.access.admission_table import AdmissionTable
from server.access.guards import Doors, install
from server.access.tenants import Tenancy
from server.api.admin.endpoint import AdminRoutes, call_utility
from server.api.admin.scaling import ScalingRoutes
from server.api.admin.schema import (
    EngineList,
    ScaleRequest,
    ScaleStatus,
    UtilityAnswers,
    UtilityRequest,
)
from server.api.chat.endpoint import create_chat_completion, create_chat_completions
from server.api.chat.schema import (
    BatchChatRequest,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from server.api.classify.endpoint import classify
from server.api.classify.schema import ClassifyRequest, ClassifyResponse
from server.api.completions.endpoint import create_completion
from server.api.completions.schema import CompletionRequest, CompletionResponse
from server.api.context import Context, make_context
from server.api.conversations.endpoint import (
    ConversationRoutes,
    add_items,
    create_conversation,
    update_conversation,
)
from server.api.conversations.schema import ConversationRequest, ItemsRequest, MetadataRequest
from server.api.embeddings.endpoint import create_embeddings
from server.api.embeddings.schema import EmbeddingsRequest, EmbeddingsResponse
from server.api.invocations import AnyRequest, invoke
from server.api.lora.endpoint import load_lora_adapter, unload_lora_adapter
from server.api.lora.schema import LoadLoraRequest, UnloadLoraRequest
from server.api.messages.content import Message, MessageEvent, TokenCount
from server.api.messages.endpoint import count_tokens, create_message
from server.api.messages.schema import CountTokensRequest, MessagesRequest
from server.api.meta.endpoint import MetaRoutes
from server.api.meta.schema import (
    HealthResponse,
    LoadResponse,
    Model,
    ModelList,
    ServerInfo,
    TokenizerInfo,
    VersionResponse,
)
from server.api.openapi import (
    any_of,
    event_responses,
    json_responses,
    serve_document,
    stream_responses,
    text_responses,
    with_errors,
)
from server.api.pooling.endpoint import pool
from server.api.pooling.schema import PoolingRequest, PoolingResponse
from server.api.responses import items
from server.api.responses.endpoint import count_input_tokens, create_response
from server.api.responses.events import ResponseEvent
from server.api.responses.kept import KeptRoutes
from server.api.responses.schema import ResponsesRequest
from server.api.route import get, plain, post, post_for_model
from server.api.scores.endpoint import COHERE_PATH, rerank, score
from server.api.scores.schema import RerankRequest, RerankResponse, ScoreRequest, ScoreResponse
from server.api.status.endpoint import status_routes
from server.api.tokenize.endpoint import detokenize, tokenize
from server.api.tokenize.schema import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from server.config import FrontEndConfig
from server.fleet.control import SupervisorControl
from server.http.call import foreseen
from server.http.direct import Direct
from server.http.doorstep import Doorstep
from server.http.errors import ApiError, MessagesErrorResponse
from server.http.load_header import LoadHeader
from server.http.own_middleware import add_own
from server.observe.access_log import AccessLog
from server.observe.engine_load import engine_load
from server.observe.metrics import FrontEndMetrics
from server.observe.tracing import RequestTracer
from server.observe.waiting_engines import WaitingEngines
from server.router.generation_client import GenerationClient, NoEngineAvailable
from server.store.service import ResponseStore
from server.text.tokenizer import ServedTokenizer

if TYPE_CHECKING:
    from server.upstreams.forwarder import Forwarder

_POST_ERRORS = (400, 401, 404, 413, 415, 500)


def build_app(
    config: FrontEndConfig,
    client: GenerationClient,
    tokenizer: ServedTokenizer,
    metrics: FrontEndMetrics,
    table: AdmissionTable | None = None,
    control: SupervisorControl | None = None,
    tracer: RequestTracer | None = None,
    store: ResponseStore | None = None,
    pooling: PoolingSpec | None = None,
    forwarder: "Forwarder | None" = None,
) -> FastAPI:
    """Return the application of one front end.

    `table` is where the front ends of a node count what they have taken on; None for one that is
    alone. `control` reaches the node's supervisor, if it has one. `tracer`
    makes a span of each request, if there is one. `store` keeps responses, if they are kept.
    `pooling` is how the model makes vectors, if that is what it does. `forwarder` serves models of
    other servers, if there are any.
    """
    doors = Doors(config.guards)
    tenancy = Tenancy(config)
    admission = Admission(
        table or AdmissionTable(None),
        config.overload,
        lambda: client.num_slots,
        config.tenants,
        several=functools.partial(tenancy.are_several, doors),
    )
    created = int(time.time())
    context = make_context(
        config,
        client,
        tokenizer,
        metrics,
        admission,
        tenancy,
        created,
        tracer,
        store,
        pooling,
        forwarder,
    )
    meta = MetaRoutes(context, config, WaitingEngines(config, control))
    app = FastAPI(
        title="Swell",
        version=SWELL_VERSION,
        description="OpenAI-compatible API over data-parallel engines. Unknown fields of request "
        "bodies are ignored.",
        redirect_slashes=False,
        redoc_url=None,
        # Spans and metrics are our own (`server.observe`): it need not look for others' each time.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    direct = _direct_routes(context)
    app.router.routes += [
        *direct,
        *_open_routes(meta),
        *status_routes(context),
        *([] if store is None else _kept_routes(context, store)),
    ]
    if config.http.enable_tokenizer_info_endpoint:
        told = json_responses(TokenizerInfo, 401)
        app.router.routes.append(get("/tokenizer_info", meta.tokenizer_info, told))
    if doors.has_admin:
        shown = json_responses(ServerInfo, 403)
        app.router.routes.append(get("/server_info", meta.server_info, shown))
        app.router.routes += _admin_routes(context, control)
    for kind in (ApiError, NoEngineAvailable, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _answer_error)
    # The last that is added is the outermost.
    app.add_middleware(Direct, endpoints={route.path: route.app for route in direct})
    app.add_middleware(LoadHeader, load=functools.partial(engine_load, client))
    install(app, doors, config.guards, metrics)
    add_own(app, config.http.middleware)
    if config.http.access_log:
        app.add_middleware(AccessLog)
    app.add_middleware(Doorstep, root_path=config.http.root_path.rstrip("/"))
    serve_document(app)
    return app


def _open_routes(meta: MetaRoutes) -> list[APIRoute]:
    """Return what says which models there are and how the server does."""
    return [
        get("/v1/models", meta.list_models, json_responses(ModelList, 401)),
        get("/v1/models/{model_id:path}", meta.retrieve_model, json_responses(Model, 401, 404)),
        get("/health", meta.health, json_responses(HealthResponse)),
        get("/ping", meta.ping, json_responses(HealthResponse, 503)),
        plain("POST", "/ping", meta.ping, json_responses(HealthResponse, 503)),
        get("/ready", meta.ready, json_responses(HealthResponse, 503)),
        get("/version", meta.version, json_responses(VersionResponse)),
        get("/load", meta.load, json_responses(LoadResponse, 401)),
        get("/metrics", meta.metrics, text_responses(401)),
        get("/metrics/engine/{rank}", meta.engine_metrics, text_responses(400, 401, 404)),
    ]


def _direct_routes(context: Context) -> list[APIRoute]:
    """Return the endpoints whose requests go past the router (`server.http.direct`)."""
    completion = stream_responses(CompletionResponse, CompletionResponse, *_POST_ERRORS, 429, 503)
    chat = stream_responses(ChatCompletionResponse, ChatCompletionChunk, *_POST_ERRORS, 429, 503)
    response = event_responses(items.Response, get_args(ResponseEvent), *_POST_ERRORS, 429, 503)
    message = with_errors(
        event_responses(Message, get_args(MessageEvent), *_POST_ERRORS, 429, 503),
        MessagesErrorResponse,
    )
    count = with_errors(json_responses(TokenCount, *_POST_ERRORS, 503), MessagesErrorResponse)
    return [
        post_for_model(
            "/v1/completions", create_completion, CompletionRequest, completion, context
        ),
        post_for_model(
            "/v1/chat/completions", create_chat_completion, ChatCompletionRequest, chat, context
        ),
        post_for_model(
            "/v1/chat/completions/batch",
            create_chat_completions,
            BatchChatRequest,
            json_responses(ChatCompletionResponse, *_POST_ERRORS, 429, 503),
            context,
        ),
        post_for_model("/v1/responses", create_response, ResponsesRequest, response, context),
        post_for_model(
            "/v1/responses/input_tokens",
            count_input_tokens,
            ResponsesRequest,
            json_responses(items.InputTokens, *_POST_ERRORS, 503),
            context,
        ),
        *_pooling_routes(context),
        post_for_model("/v1/messages", create_message, MessagesRequest, message, context),
        post_for_model(
            "/v1/messages/count_tokens",
            count_tokens,
            CountTokensRequest,
            count,
            context,
        ),
        post_for_model(
            "/invocations", invoke, AnyRequest, any_of(chat, completion, response), context
        ),
        post_for_model(
            "/tokenize",
            tokenize,
            TokenizeRequest,
            json_responses(TokenizeResponse, *_POST_ERRORS, 503),
            context,
        ),
        post_for_model(
            "/detokenize",
            detokenize,
            DetokenizeRequest,
            json_responses(DetokenizeResponse, *_POST_ERRORS, 503),
            context,
        ),
    ]


def _pooling_routes(context: Context) -> list[APIRoute]:
    """Return what models serve that make vectors; others say that they do not."""
    errors = (*_POST_ERRORS, 429, 503)
    embeddings = json_responses(EmbeddingsResponse, *errors)
    scored, ranked = json_responses(ScoreResponse, *errors), json_responses(RerankResponse, *errors)
    return [
        post_for_model("/v1/embeddings", create_embeddings, EmbeddingsRequest, embeddings, context),
        post_for_model(
            "/pooling", pool, PoolingRequest, json_responses(PoolingResponse, *errors), context
        ),
        post_for_model(
            "/classify",
            classify,
            ClassifyRequest,
            json_responses(ClassifyResponse, *errors),
            context,
        ),
        *(
            post_for_model(path, score, ScoreRequest, scored, context)
            for path in ("/score", "/v1/score")
        ),
        *(
            post_for_model(path, rerank, RerankRequest, ranked, context)
            for path in ("/rerank", "/v1/rerank", COHERE_PATH)
        ),
    ]


def _kept_routes(context: Context, store: ResponseStore) -> list[APIRoute]:
    responses, conversations = KeptRoutes(store), ConversationRoutes(store)
    one, many = "/v1/responses/{response_id}", "/v1/conversations/{conversation_id}"
    errors = (400, 401, 404, 503)
    shown = json_responses(items.Response, *errors)
    conversation = json_responses(items.Conversation, *_POST_ERRORS, 503)
    listed = json_responses(items.ItemList, *_POST_ERRORS, 503)
    item = json_responses(items.OutputMessage, *errors)
    gone = json_responses(items.Deleted, *errors)
    return [
        get(one, responses.retrieve, shown),
        plain("DELETE", one, responses.delete, gone),
        plain("POST", f"{one}/cancel", responses.cancel, shown),
        get(f"{one}/input_items", responses.input_items, listed),
        post("/v1/conversations", create_conversation, ConversationRequest, conversation, context),
        get(many, conversations.retrieve, conversation),
        post(many, update_conversation, MetadataRequest, conversation, context),
        plain("DELETE", many, conversations.delete, gone),
        get(f"{many}/items", conversations.list_items, listed),
        post(f"{many}/items", add_items, ItemsRequest, listed, context),
        get(f"{many}/items/{{item_id}}", conversations.retrieve_item, item),
        plain("DELETE", f"{many}/items/{{item_id}}", conversations.delete_item, conversation),
    ]


def _admin_routes(context: Context, control: SupervisorControl | None) -> list[APIRoute]:
    admin = AdminRoutes(context)
    changed = text_responses(
        400, 403, 404, 413, 415, 503, kind="text/plain; charset=utf-8", text="It is done."
    )
    scaling = ScalingRoutes(control)
    errors = (400, 403, 500)
    return [
        get("/admin/scale", scaling.status, json_responses(ScaleStatus, 403, 503)),
        post(
            "/admin/scale",
            scaling.scale,
            ScaleRequest,
            json_responses(ScaleStatus, *errors, 413, 415, 503),
            context,
        ),
        plain("POST", "/admin/restart", scaling.restart, json_responses(ScaleStatus, 403, 503)),
        get("/admin/engines", admin.list_engines, json_responses(EngineList, 403)),
        plain(
            "POST",
            "/admin/reset-prefix-cache",
            admin.reset_prefix_cache,
            json_responses(UtilityAnswers, *errors, 503),
        ),
        post("/v1/load_lora_adapter", load_lora_adapter, LoadLoraRequest, changed, context),
        post("/v1/unload_lora_adapter", unload_lora_adapter, UnloadLoraRequest, changed, context),
        post(
            "/admin/utilities",
            call_utility,
            UtilityRequest,
            json_responses(UtilityAnswers, *errors, 413, 415, 503),
            context,
        ),
    ]


async def _answer_error(request: Request, error: Exception) -> Response:
    name = request.headers.get("x-request-id", "-")
    answer = foreseen(error, name)
    return Response(
        answer.body(request.scope["path"]),
        answer.status,
        # What nobody foresaw is answered outside of what names all other answers.
        headers={**dict(answer.headers), "x-request-id": name},
        media_type="application/json",
    )
