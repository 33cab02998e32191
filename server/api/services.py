"""What endpoints are served with, made once per process."""

import time
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
from fastapi import Depends, Request

from engine.shared.model_files import served_names
from engine.shared.pooling import PoolingSpec
from server.access.admission import Admission, TenantsElsewhere
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
from server.text.tokenizer import ServedTokenizer, TokenizerError

if TYPE_CHECKING:
    from server.media.images import Images
    from server.media.processors import ImageProcessor
    from server.upstreams.forwarder import Forwarder


class Services(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a front end that endpoints use."""

    config: FrontEndConfig
    names: tuple[str, ...]
    """By which clients may call the model, the preferred one first."""
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
    """Reads how long the node's requests waited for their first token, and how many there were."""
    created: int
    """Unix time at which this process began to serve."""
    control: SupervisorControl | None
    """Reaches the node's supervisor, if it has one."""
    tracer: RequestTracer | None
    """Makes a span of each request, if there is one."""
    store: ResponseStore | None
    """Where responses are kept, if they are."""
    forwarder: "Forwarder | None"
    """Serves the models of other servers, if there are any."""

    @property
    def own_models(self) -> set[str]:
        """The names that this server answers to, those of adapters included."""
        return {*self.names, *self.client.adapters.served}

    @property
    def known_max_model_len(self) -> int | None:
        """The longest sequence that the engines take; None before the first has joined."""
        try:
            return self.client.max_model_len
        except NoEngineAvailable:
            return None

    def asked_model(self, asked: str | None) -> tuple[str, str]:
        """Return the name to answer with, and the version of the adapter that it means, if any.

        Raises:
            ApiError: 404, neither a served model nor an adapter has that name.
        """
        if asked is None or asked in self.names:
            return asked or self.names[0], ""
        version = self.client.adapters.version(asked)
        if version is None:
            raise model_not_found(asked, self.own_models)
        return asked, version

    def model_name(self, asked: str | None) -> str:
        """Return the name to answer with, where adapters make no difference or are not served.

        Raises:
            ApiError: 404, no served model has that name.
        """
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            raise model_not_found(asked, self.names)
        return asked


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
    elsewhere: TenantsElsewhere | None = None,
) -> Services:
    """Return what the endpoints of a front end are served with.

    Args:
        table: where the front ends of a node count what they have taken on; None for one alone.
        pooling: how the model makes vectors, if it does.
        processor: how it takes images, if it does.
        elsewhere: what tenants hold in other nodes, where limits for them are set.

    Raises:
        BadFormats: settings contradict each other.
        BadGuards: there is no key where one is said to be.
    """
    access, by_user = PathAccess(config.guards), config.tenants.tenant_by == "user"
    admission = Admission(
        table or AdmissionTable(None),
        config.overload,
        lambda: client.num_slots,
        config.tenants,
        several=lambda: by_user or access.api.num_tenants > 1,
        elsewhere=elsewhere,
        on_rejection=partial(metrics.count, "admission_rejections"),
    )
    template = tokenizer.chat_template
    formats = answer_formats(
        config.answer,
        None if template is None else template.source,
        shows_tools=template is not None and template.shows_tools,
        preset=tokenizer.preset,
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
        raise TokenizerError(
            f"the tokenizer has no token {processor.token}, which stands for images"
        )
    from server.media.images import Images  # with Pillow, which only such models need

    return Images(processor, token_id, config.media, metrics, max_images=config.model.max_images)


def services_of(request: Request) -> Services:
    """Return the services of the application that a request came to."""
    services: Services = request.app.state.services
    return services


ServicesDep = Annotated[Services, Depends(services_of)]
