"""Shared services of the endpoints, created once per process."""

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
from fastapi import Depends, Request

from engine.shared.model_files import served_names
from engine.shared.pooling import PoolingSpec
from server.access.admission import Admission, RemoteTenants
from server.access.admission_table import AdmissionTable
from server.access.guards import PathAccess
from server.access.tenants import Tenancy
from server.answer.formats import answer_formats
from server.config import FrontEndConfig
from server.control import SupervisorControl
from server.errors import model_not_found
from server.generate.grammar_check import GrammarCheck
from server.generate.model import ServedModel
from server.generate.pooling import PoolingModel
from server.http.body_budget import BodyBudget
from server.http.call import BodyLimits
from server.observe.metrics import FrontEndMetrics
from server.observe.shared_work import SharedWork
from server.observe.tracing import RequestTracer
from server.router.generation_client import GenerationClient, NoEngineAvailable
from server.store.service import ResponseStore
from server.text.detokenizer import TokenTable
from server.text.request_templates import RequestTemplates
from server.text.tokenizer import ServedTokenizer

if TYPE_CHECKING:
    from server.media.images import Images
    from server.media.processors import ImageProcessor
    from server.upstreams.forwarder import Forwarder

logger = logging.getLogger(__name__)


class Services(msgspec.Struct, frozen=True, kw_only=True):
    """The components of a front end that endpoints use."""

    config: FrontEndConfig
    names: tuple[str, ...]
    """Names of the model, the preferred one first."""
    client: GenerationClient
    model: ServedModel
    table: TokenTable
    metrics: FrontEndMetrics
    access: PathAccess
    admission: Admission
    tenancy: Tenancy
    body_limits: BodyLimits
    scrape: SharedWork[bytes]
    """Reads the metrics of the node's processes."""
    first_token_times: SharedWork[tuple[float, int]]
    """Reads the sum (seconds) and count of the node's times to first token."""
    created: int
    """Unix time at which this process started to serve."""
    control: SupervisorControl | None
    """Connection to the node's supervisor, if there is one."""
    tracer: RequestTracer | None
    """Creates a span for each request, if tracing is enabled."""
    store: ResponseStore | None
    """Storage for responses, if enabled."""
    forwarder: "Forwarder | None"
    """Forwards requests for models of other servers, if there are any."""

    @property
    def own_models(self) -> set[str]:
        """Names that this server answers to, including adapters."""
        return {*self.names, *self.client.adapters.served}

    @property
    def known_max_model_len(self) -> int | None:
        """Maximum sequence length of the engines; None before the first has registered."""
        try:
            return self.client.max_model_len
        except NoEngineAvailable:
            return None

    def requested_model(self, name: str | None) -> tuple[str, str]:
        """Return the name to answer with, and the version of the adapter it names, if any.

        Raises:
            ApiError: 404, no served model or adapter has that name.
        """
        if not name or name in self.names:
            return name or self.names[0], ""
        version = self.client.adapters.version(name)
        if version is None:
            raise model_not_found(name, self.own_models)
        return name, version

    def model_name(self, name: str | None) -> str:
        """Return the name to answer with, for endpoints that do not serve adapters.

        Raises:
            ApiError: 404, no served model has that name.
        """
        if not name:
            return self.names[0]
        if name not in self.names:
            raise model_not_found(name, self.names)
        return name


def make_services(
    config: FrontEndConfig,
    client: GenerationClient,
    tokenizer: ServedTokenizer,
    metrics: FrontEndMetrics,
    *,
    table: AdmissionTable | None = None,
    control: SupervisorControl | None = None,
    tracer: RequestTracer | None = None,
    store: ResponseStore | None = None,
    pooling: PoolingSpec | None = None,
    processor: "ImageProcessor | None" = None,
    forwarder: "Forwarder | None" = None,
    remote_tenants: RemoteTenants | None = None,
) -> Services:
    """Create the services of a front end.

    Args:
        table: shared load counters of the node's front ends; None for a single front end.
        pooling: the pooling model, if it is one.
        processor: image processing of the model, if it takes images.
        remote_tenants: tenants' usage on other nodes, if there are limits across nodes.

    Raises:
        BadFormats: settings contradict each other.
        BadGuards: a configured key is missing.
    """
    access, by_user = PathAccess(config.guards), config.tenants.tenant_by == "user"
    admission = Admission(
        table or AdmissionTable(None),
        config.overload,
        lambda: client.num_slots,
        config.tenants,
        several=lambda: by_user or access.api.num_tenants > 1,
        remote_tenants=remote_tenants,
        on_rejection=partial(metrics.count, "admission_rejections"),
    )
    template = tokenizer.chat_template
    formats = answer_formats(
        config.answer,
        None if template is None else template.source,
        shows_tools=template is not None and template.shows_tools,
        preset=tokenizer.preset,
        is_special=tokenizer.is_special_text,
    )
    trusts_templates = config.http.trust_request_chat_template
    images = _images(processor, tokenizer, config, metrics)
    max_body_bytes = config.guards.max_body_bytes
    if images is not None:
        max_body_bytes += 4 * config.media.max_image_bytes // 3  # base64
    return Services(
        config=config,
        names=served_names(config.model),
        client=client,
        model=ServedModel(
            tokenizer,
            formats,
            GrammarCheck(tokenizer.special_tokens),
            RequestTemplates(tokenizer.named_tokens) if trusts_templates else None,
            None if pooling is None else PoolingModel(pooling, tokenizer),
            config.http.max_logprobs,
            images,
        ),
        table=TokenTable(tokenizer),
        metrics=metrics,
        access=access,
        admission=admission,
        tenancy=Tenancy(config),
        body_limits=BodyLimits(
            max_body_bytes,
            config.guards.receive_timeout,
            BodyBudget(admission.table, config.guards.max_body_bytes_in_flight),
        ),
        scrape=SharedWork(lambda: metrics.scrape(client)),
        first_token_times=SharedWork(lambda: metrics.first_token_times),
        created=int(time.time()),
        control=control,
        tracer=tracer,
        store=store,
        forwarder=forwarder,
    )


def _images(
    processor: "ImageProcessor | None",
    tokenizer: ServedTokenizer,
    config: FrontEndConfig,
    metrics: FrontEndMetrics,
) -> "Images | None":
    if processor is None or not config.model.max_images:
        return None
    token_id = tokenizer.token_to_id(processor.token)
    if token_id is None:
        logger.warning("no images: the tokenizer has no token %s", processor.token)
        return None
    from server.media.images import Images  # imports Pillow, which only models with images need

    return Images(processor, token_id, config.media, metrics, max_images=config.model.max_images)


def services_of(request: Request) -> Services:
    """Return the services of the application that a request belongs to."""
    services: Services = request.app.state.services
    return services


ServicesDep = Annotated[Services, Depends(services_of)]
