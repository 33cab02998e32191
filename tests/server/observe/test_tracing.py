"""Spans of requests, as a collector receives them over OTLP/HTTP."""

import gzip
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from fastapi import FastAPI
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from server.app import build_app
from server.config import FrontEndConfig
from server.observe.metrics import FrontEndMetrics
from server.observe.tracing import RequestTracer, request_tracer
from server.router.generation_client import NoEngineAvailable
from server.text.tokenizer import ServedTokenizer

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """An OTLP/HTTP endpoint that keeps the spans it gets."""

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
    return build_app(config, engines, tokenizer, front_end_metrics, tracer=tracer)


def test_a_request_is_a_span_in_its_clients_trace(
    http: Any, tracer: RequestTracer, collector: Collector
) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "x-request-id": "mine"}
    body = {"model": "tiny", "prompt": "hello", "temperature": 0.5, "max_tokens": 5}
    answer = http.post("/v1/completions", body, headers=headers)
    usage = answer.json()["usage"]
    tracer.close()
    (span,) = collector.spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert span.kind == Span.SPAN_KIND_SERVER
    assert span.start_time_unix_nano <= span.events[0].time_unix_nano <= span.end_time_unix_nano
    found = attributes(span)
    assert found["gen_ai.operation.name"] == "text_completion"
    assert found["gen_ai.request.id"] == "mine"
    assert found["gen_ai.response.model"] == "tiny"
    assert found["gen_ai.request.temperature"] == 0.5
    assert found["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.completion_tokens"] == usage["completion_tokens"]
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    assert 0 <= found["gen_ai.latency.time_to_first_token"] <= found["gen_ai.latency.e2e"]


def test_streams_of_several_choices_are_one_span_without_text(
    http: Any, tracer: RequestTracer, collector: Collector
) -> None:
    http.stream(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a secret"}], "n": 2, "max_tokens": 20},
    )
    tracer.close()
    (span,) = collector.spans
    assert not span.parent_span_id
    found = attributes(span)
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.n"] == 2
    assert found["gen_ai.response.finish_reasons"] == ["stop", "stop"]
    assert b"secret" not in span.SerializeToString()
    assert b"hello world" not in span.SerializeToString()


def test_a_request_that_fails_says_so(
    http: Any, engines: Any, tracer: RequestTracer, collector: Collector
) -> None:
    engines.script = lambda stream: [NoEngineAvailable("gone")]
    assert http.post("/v1/completions", {"model": "tiny", "prompt": "hello"}).status_code == 503
    tracer.close()
    (span,) = collector.spans
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert attributes(span)["error.type"] == "NoEngineAvailable"
    assert attributes(span)["gen_ai.response.finish_reasons"] == ["error"]


def test_without_an_endpoint_there_is_no_tracer_and_nothing_is_imported() -> None:
    assert request_tracer(None) is None
    code = "import sys, server.observe.tracing as _; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
