"""Request spans, as received by an OTLP/HTTP collector."""

import gzip
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from fastapi import FastAPI
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from engine.shared.messages import RequestOutput, RequestTiming
from server.api.services import make_services
from server.api.vectors.pooled_call import UNSAMPLED
from server.app import build_app
from server.config import FrontEndConfig
from server.observe.metrics import FrontEndMetrics
from server.observe.tracing import (
    MAX_TRACED_SEQUENCES,
    EndedRequest,
    RequestTracer,
    request_tracer,
)
from server.router.generation_client import NoEngineAvailable
from server.router.request import EnginePeriod, EngineTimes
from server.text.tokenizer import ServedTokenizer

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """An OTLP/HTTP endpoint that stores received spans."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        collector = self
        self.spans: list[Span] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = HTTPServer((host, 0), Handler)
        self.url = f"http://{host}:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def attributes(span: Span) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        if kind == "array_value":
            return [plain(each) for each in value.array_value.values]
        return getattr(value, kind)

    return {each.key: plain(each.value) for each in span.attributes}


@pytest.fixture
def tracer(collector: Collector) -> RequestTracer:
    made = request_tracer(collector.url)
    assert made is not None
    return made


@pytest.fixture
def app(
    config: FrontEndConfig,
    engines: Any,
    tokenizer: ServedTokenizer,
    front_end_metrics: FrontEndMetrics,
    tracer: RequestTracer,
) -> FastAPI:
    return build_app(make_services(config, engines, tokenizer, front_end_metrics, tracer=tracer))


def ended_request(**fields: Any) -> EndedRequest:
    return EndedRequest(
        operation="chat", request_id="mine", model="tiny", carrier={}, sampling=UNSAMPLED,
        n=1, arrived=time.monotonic(), first_token=None, prompt_tokens=3, cached_tokens=1,
        completion_tokens=2, finish_reasons=["stop"], error=None, **fields,
    )  # fmt: skip


def test_a_span_contains_how_long_its_request_waited_and_computed(
    tracer: RequestTracer, collector: Collector
) -> None:
    tracer.record(ended_request(timing=RequestTiming(queue=0.25, prefill=0.5, decode=1.0)))
    tracer.close()
    (span,) = collector.spans
    assert span.name == "chat tiny"
    found = attributes(span)
    for name, seconds in (
        ("queue", 0.25), ("model_prefill", 0.5), ("model_decode", 1.0), ("model_inference", 1.5),
    ):  # fmt: skip
        assert found[f"gen_ai.latency.time_in_{name}"] == seconds
    assert found["gen_ai.usage.cache_read.input_tokens"] == 1


def test_each_engine_period_and_move_is_a_child_span(
    tracer: RequestTracer, collector: Collector
) -> None:
    arrived = time.monotonic()
    times = EngineTimes()
    times.sent(0, arrived + 0.5)
    times.record_timing(RequestTiming(0.25, 0.5), arrived + 1.5, last=False)
    times.left(arrived + 3.5)
    times.sent(2, arrived + 4.0)
    times.record_timing(RequestTiming(0.125, 0.25, 1.0), arrived + 6.0, last=True)
    times.ended(arrived + 6.0)
    tracer.record(ended_request(engine_periods=[times.engine_periods]))
    tracer.close()
    spans = {each.name: each for each in collector.spans}
    request = spans.pop("chat tiny")
    assert list(spans) == ["engine 0", "move to engine 2", "engine 2"]
    assert {each.parent_span_id for each in spans.values()} == {request.span_id}

    def seconds(span: Span) -> float:
        return round((span.end_time_unix_nano - span.start_time_unix_nano) / 1e9, 3)

    assert [seconds(each) for each in spans.values()] == [3.0, 0.5, 2.0]
    first, move, second = (attributes(each) for each in spans.values())
    assert (first["swell.engine"], second["swell.engine"]) == (0, 2)
    assert (move["swell.from_engine"], move["swell.to_engine"]) == (0, 2)
    # It decoded there from its first output until the engine was lost.
    assert first["gen_ai.latency.time_in_model_decode"] == pytest.approx(2.0)
    assert second["gen_ai.latency.time_in_queue"] == 0.125


def test_engine_spans_of_many_sequences_are_limited(
    tracer: RequestTracer, collector: Collector
) -> None:
    engine_periods = [[EnginePeriod(0, 0.0, 1.0, None)] for _ in range(MAX_TRACED_SEQUENCES + 5)]
    tracer.record(ended_request(engine_periods=engine_periods))
    tracer.close()
    assert len(collector.spans) == 1 + MAX_TRACED_SEQUENCES


def test_request_is_a_span_in_trace_of_client(
    http: Any, tracer: RequestTracer, collector: Collector
) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "x-request-id": "mine"}
    body = {"model": "tiny", "prompt": "hello", "temperature": 0.5, "max_tokens": 5}
    answer = http.post("/v1/completions", body, headers=headers)
    usage = answer.json()["usage"]
    tracer.close()
    engine, span = collector.spans
    assert engine.parent_span_id == span.span_id
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert span.kind == Span.SPAN_KIND_SERVER
    assert span.start_time_unix_nano <= span.events[0].time_unix_nano <= span.end_time_unix_nano
    found = attributes(span)
    assert span.name == "text_completion tiny"
    assert found["gen_ai.operation.name"] == "text_completion"
    assert found["gen_ai.provider.name"] == "swell"
    assert found["gen_ai.request.choice.count"] == 1
    assert found["gen_ai.request.id"] == "mine"
    assert found["gen_ai.response.model"] == "tiny"
    assert found["gen_ai.request.temperature"] == 0.5
    assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert found["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.completion_tokens"] == usage["completion_tokens"]
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    assert 0 <= found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]


def test_stream_with_several_choices_is_one_span_without_text(
    http: Any, tracer: RequestTracer, collector: Collector
) -> None:
    http.stream(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a secret"}], "n": 2, "max_tokens": 20},
    )
    tracer.close()
    (span,) = [each for each in collector.spans if not each.parent_span_id]
    found = attributes(span)
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.n"] == 2
    assert found["gen_ai.response.finish_reasons"] == ["stop", "stop"]
    children = [each for each in collector.spans if each.parent_span_id]
    assert [attributes(each)["swell.sequence"] for each in children] == [0, 1]
    for each in collector.spans:
        assert b"secret" not in each.SerializeToString()
        assert b"hello world" not in each.SerializeToString()


def test_failed_request_has_error_status(
    http: Any, engines: Any, tracer: RequestTracer, collector: Collector
) -> None:
    engines.script = lambda stream: [NoEngineAvailable("gone")]
    assert http.post("/v1/completions", {"model": "tiny", "prompt": "hello"}).status_code == 503
    tracer.close()
    (span,) = [each for each in collector.spans if not each.parent_span_id]
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert attributes(span)["error.type"] == "NoEngineAvailable"
    assert attributes(span)["gen_ai.response.finish_reasons"] == ["error"]


def test_lost_request_reports_computed_time(
    http: Any, engines: Any, tracer: RequestTracer, collector: Collector
) -> None:
    begun = RequestOutput(1, [5], timing=RequestTiming(queue=0.25, prefill=0.5, decode=0.0))
    engines.script = lambda _: [begun, NoEngineAvailable("the engine died")]
    assert http.post("/v1/completions", {"prompt": "hello"}).status_code == 503
    tracer.close()
    (span,) = [each for each in collector.spans if not each.parent_span_id]
    assert attributes(span)["gen_ai.latency.time_in_model_prefill"] == 0.5


def test_no_tracer_and_no_import_without_endpoint() -> None:
    assert request_tracer(None) is None
    code = "import sys, server.observe.tracing as _; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
