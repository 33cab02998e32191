"""What every endpoint needs, made once per process."""

import msgspec

from engine.shared.model_files import served_names
from server.access.admission import BYTES_PER_TOKEN, Admission
from server.access.tenants import Tenancy
from server.answer.formats import AnswerFormats, answer_formats
from server.api.responses.schema import ResponsesRequest
from server.api.shared.fields import SamplingFields
from server.config import FrontEndConfig
from server.generate.checks import Limits
from server.generate.structured_outputs import GrammarCheck
from server.http.body_budget import BodyBudget
from server.http.call import BodyLimits, Call
from server.http.errors import model_not_found
from server.observe.metrics import FrontEndMetrics
from server.observe.tracing import RequestTracer
from server.router.generation_client import GenerationClient, NoEngineAvailable
from server.text.detokenizer import TokenTable
from server.text.tokenizer import ServedTokenizer


class Context(msgspec.Struct, frozen=True):
    """The parts of a front end that endpoints use."""

    client: GenerationClient
    tokenizer: ServedTokenizer
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
    formats: AnswerFormats
    grammars: GrammarCheck
    created: int
    """Unix time at which this process began to serve."""

    def model_name(self, asked: str | None) -> str:
        """Return the name to answer with.

        Raises:
            ApiError: 404, no served model has that name.
        """
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            raise model_not_found(asked)
        return asked

    def admit(
        self, call: Call, request: SamplingFields | ResponsesRequest, prompts: int, copies: int
    ) -> None:
        """Reserve a place for a call with so many sequences of each prompt, until it ends.

        Raises:
            ApiError: it asks for what the operator does not allow.
            NoEngineAvailable: nothing can serve now.
            Overloaded: the queue is full.
        """
        self.tenancy.check(request.priority, call.pins_rank)
        self.tenancy.check_sequences(prompts, copies)
        call.tenant = self.tenancy.tenant(call.tenant, request.user)
        if not self.client.takes_requests:
            raise NoEngineAvailable("No engine can serve now; try again.")
        tokens = copies * call.body_size // BYTES_PER_TOKEN
        call.reservation = self.admission.reserve(
            prompts * copies, tokens, call.arrived, call.tenant.place
        )

    def limits(self) -> Limits:
        """Return what requests are held against now.

        Raises:
            NoEngineAvailable: no engine has joined yet.
        """
        return Limits(
            self.client.max_model_len,
            self.max_logprobs,
            self.tokenizer.vocab_size,
            self.grammars,
        )


def make_context(
    config: FrontEndConfig,
    client: GenerationClient,
    tokenizer: ServedTokenizer,
    metrics: FrontEndMetrics,
    admission: Admission,
    tenancy: Tenancy,
    created: int,
    tracer: RequestTracer | None = None,
) -> Context:
    """Return the context of a front end.

    Raises:
        BadFormats: settings contradict each other.
    """
    template = tokenizer.chat_template
    return Context(
        client=client,
        tokenizer=tokenizer,
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
        formats=answer_formats(
            config.answer,
            None if template is None else template.source,
            shows_tools=template is not None and template.shows_tools,
            family=tokenizer.family,
        ),
        grammars=GrammarCheck(tokenizer.special_tokens),
        created=created,
    )
