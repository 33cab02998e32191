"""What every endpoint needs, made once per process."""

from typing import TYPE_CHECKING

import msgspec

from engine.shared.model_files import served_names
from engine.shared.pooling import PoolingSpec
from server.access.admission import Admission
from server.access.tenants import Tenancy
from server.answer.formats import answer_formats
from server.config import FrontEndConfig
from server.generate.grammar_check import GrammarCheck
from server.generate.model import ServedModel
from server.http.body_budget import BodyBudget
from server.http.call import BodyLimits
from server.http.errors import model_not_found
from server.observe.metrics import FrontEndMetrics
from server.observe.tracing import RequestTracer
from server.pooling.model import PoolingModel
from server.router.generation_client import GenerationClient
from server.store.service import ResponseStore
from server.text.detokenizer import TokenTable
from server.text.request_templates import RequestTemplates
from server.text.tokenizer import ServedTokenizer

if TYPE_CHECKING:
    from server.upstreams.forwarder import Forwarder


class Context(msgspec.Struct, frozen=True):
    """The parts of a front end that endpoints use."""

    client: GenerationClient
    model: ServedModel
    table: TokenTable
    metrics: FrontEndMetrics
    admission: Admission
    tenancy: Tenancy
    body_limits: BodyLimits
    request_timeout: float | None
    """Most seconds from a request's arrival to its end."""
    tracer: RequestTracer | None
    names: tuple[str, ...]
    max_logprobs: int
    force_usage: bool
    """Whether every stream ends with its usage."""
    shows_timing: bool
    """Whether answers of one sequence show how long they took."""
    created: int
    """Unix time at which this process began to serve."""
    store: ResponseStore | None
    """Where responses are kept, if they are."""
    forwarder: "Forwarder | None"
    """Serves the models of other servers, if there are any."""

    @property
    def own_models(self) -> set[str]:
        """The names that this server answers to, those of adapters included."""
        return {*self.names, *self.client.adapters.served}

    def asked_model(self, asked: str | None) -> tuple[str, str]:
        """Return the name to answer with, and the version of the adapter that it means, if any.

        Raises:
            ApiError: 404, neither a served model nor an adapter has that name.
        """
        if asked is None or asked in self.names:
            return asked or self.names[0], ""
        version = self.client.adapters.version(asked)
        if version is None:
            raise model_not_found(asked)
        return asked, version

    def model_name(self, asked: str | None) -> str:
        """Return the name to answer with, where adapters make no difference or are not served.

        Raises:
            ApiError: 404, no served model has that name.
        """
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            raise model_not_found(asked)
        return asked


def make_context(
    config: FrontEndConfig,
    client: GenerationClient,
    tokenizer: ServedTokenizer,
    metrics: FrontEndMetrics,
    admission: Admission,
    tenancy: Tenancy,
    created: int,
    tracer: RequestTracer | None = None,
    store: ResponseStore | None = None,
    pooling: PoolingSpec | None = None,
    forwarder: "Forwarder | None" = None,
) -> Context:
    """Return the context of a front end.

    `pooling` is how the model makes vectors, if it does; `forwarder` serves models of others.

    Raises:
        BadFormats: settings contradict each other.
    """
    template = tokenizer.chat_template
    return Context(
        client=client,
        model=ServedModel(
            tokenizer,
            answer_formats(
                config.answer,
                None if template is None else template.source,
                shows_tools=template is not None and template.shows_tools,
                family=tokenizer.family,
            ),
            GrammarCheck(tokenizer.special_tokens),
            RequestTemplates(tokenizer.named_tokens)
            if config.http.trust_request_chat_template
            else None,
            PoolingModel.of(pooling, tokenizer),
        ),
        table=TokenTable(tokenizer),
        metrics=metrics,
        admission=admission,
        tenancy=tenancy,
        body_limits=BodyLimits(
            config.guards.max_body_bytes,
            config.guards.receive_timeout,
            BodyBudget(admission.table, config.guards.max_body_bytes_in_flight),
        ),
        request_timeout=config.guards.request_timeout,
        tracer=tracer,
        names=served_names(config.model),
        max_logprobs=config.http.max_logprobs,
        force_usage=config.http.enable_force_include_usage,
        shows_timing=config.http.enable_per_request_metrics,
        created=created,
        store=store,
        forwarder=forwarder,
    )
