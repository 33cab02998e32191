"""OpenTelemetry traces: a span per finished request, with a child span per engine.

The span belongs to the client's trace if the request has a W3C `traceparent` header. Its name and
attributes follow OpenTelemetry's conventions for generative AI (1.38), with vLLM's names for the
latencies and for attributes that older conventions named differently; they exclude prompts and
texts. The packages (extra `otel`) are imported only if an endpoint is set; without one nothing
extra is measured.
"""

import os
import time
from typing import TYPE_CHECKING

import msgspec

from engine.shared.plugins import install_command

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

    from engine.shared.messages import RequestTiming, SamplingParams
    from server.router.request import EnginePeriod

_NS = 1_000_000_000

MAX_TRACED_SEQUENCES = 16
"""Maximum sequences of a request, from the first on, whose engines get separate spans."""


class TracingUnavailable(Exception):
    """Tracing is configured but not installed; the message says what to install."""


class EndedRequest(msgspec.Struct, kw_only=True):
    """A finished request; times in monotonic seconds."""

    operation: str
    """`text_completion` or `chat`."""
    request_id: str
    model: str
    carrier: dict[str, str]
    """The client's `traceparent` and `tracestate` headers, if sent."""
    sampling: "SamplingParams"
    n: int
    arrived: float
    first_token: float | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish_reasons: list[str]
    error: str | None
    """Type of the error that ended it."""
    timing: "RequestTiming | None" = None
    """Durations of its first sequence in engines, if known."""
    engine_periods: "list[list[EnginePeriod]]" = []
    """The engines that had each of its sequences."""


class RequestTracer:
    """Creates spans and passes them to an exporter, which sends them from a background thread."""

    def __init__(self, exporter: "SpanExporter") -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        service = os.environ.get("OTEL_SERVICE_NAME", "swell")
        self._provider: TracerProvider = TracerProvider(
            resource=Resource.create({SERVICE_NAME: service})
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("swell")
        self._propagator = TraceContextTextMapPropagator()
        # Spans have wall-clock times; everything here is measured in monotonic time.
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def record(self, request: EndedRequest) -> None:
        """Create the spans of a request that has just ended."""
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        now = time.monotonic()
        span = self._tracer.start_span(
            f"{request.operation} {request.model}",
            context=self._propagator.extract(request.carrier),
            kind=SpanKind.SERVER,
            start_time=self._at(request.arrived),
        )
        sampling = request.sampling
        span.set_attributes(
            {
                "gen_ai.operation.name": request.operation,
                "gen_ai.provider.name": "swell",
                "gen_ai.request.id": request.request_id,
                "gen_ai.request.model": request.model,
                "gen_ai.response.model": request.model,
                "gen_ai.request.n": request.n,
                "gen_ai.request.choice.count": request.n,
                "gen_ai.request.max_tokens": sampling.max_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.usage.input_tokens": request.prompt_tokens,
                "gen_ai.usage.output_tokens": request.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": request.cached_tokens,
                "gen_ai.usage.prompt_tokens": request.prompt_tokens,
                "gen_ai.usage.completion_tokens": request.completion_tokens,
                "gen_ai.usage.cached_tokens": request.cached_tokens,
                "gen_ai.response.finish_reasons": request.finish_reasons,
                "gen_ai.latency.e2e": now - request.arrived,
            }
        )
        if request.first_token is not None:
            waited = request.first_token - request.arrived
            span.set_attribute("gen_ai.latency.time_to_first_token", waited)
            span.add_event("first token", timestamp=self._at(request.first_token))
        _set_times(span, request.timing)
        for sequence, periods in enumerate(request.engine_periods[:MAX_TRACED_SEQUENCES]):
            # A span for each engine that had a sequence, and for each move to another one.
            context, before = set_span_in_context(span), None
            for period in periods:
                if before is not None:
                    engines = {"swell.from_engine": before.engine, "swell.to_engine": period.engine}
                    move = self._tracer.start_span(
                        f"move to engine {period.engine}",
                        context=context,
                        start_time=self._at(before.left),
                        attributes={"swell.sequence": sequence, **engines},
                    )
                    move.end(self._at(period.sent))
                engine_span = self._tracer.start_span(
                    f"engine {period.engine}",
                    context=context,
                    start_time=self._at(period.sent),
                    attributes={"swell.sequence": sequence, "swell.engine": period.engine},
                )
                _set_times(engine_span, period.timing)
                engine_span.end(self._at(period.left))
                before = period
        if request.error is not None:
            span.set_attribute("error.type", request.error)
            span.set_status(StatusCode.ERROR, request.error)
        span.end(self._at(now))

    def _at(self, monotonic: float) -> int:
        return self._epoch_ns + int(monotonic * _NS)

    def close(self) -> None:
        """Send pending spans and stop the exporter's thread."""
        self._provider.shutdown()


def _set_times(span: "Span", timing: "RequestTiming | None") -> None:
    if timing is not None:
        span.set_attributes(
            {
                "gen_ai.latency.time_in_queue": timing.queue,
                "gen_ai.latency.time_in_model_prefill": timing.prefill,
                "gen_ai.latency.time_in_model_decode": timing.decode,
                "gen_ai.latency.time_in_model_inference": timing.prefill + timing.decode,
            }
        )


def request_tracer(endpoint: str | None) -> RequestTracer | None:
    """Return a tracer that sends to a collector's OTLP/HTTP URL; None without a URL.

    Raises:
        TracingUnavailable: the packages are not installed.
    """
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise TracingUnavailable(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}): {install_command('otel')}"
        ) from error
    return RequestTracer(OTLPSpanExporter(endpoint=endpoint))
