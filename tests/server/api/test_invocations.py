"""Endpoints of hosting platforms: /invocations and /ping."""

from typing import Any

import pytest

from engine.shared.config import ModelConfig
from server.config import FrontEndConfig, HttpConfig

USER = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"messages": [USER]}, "chat.completion"),
        ({"prompt": "hello"}, "text_completion"),
        ({"input": "hello"}, "response"),
    ],
)
def test_invocation_is_answered_like_the_matching_endpoint(http: Any, body: Any, kind: str) -> None:
    answer = http.post("/invocations", body)
    assert (answer.status_code, answer.json()["object"]) == (200, kind)


def test_invocations_stream(http: Any) -> None:
    chunks = http.stream("/invocations", {"messages": [USER]})
    assert chunks[0]["object"] == "chat.completion.chunk"


@pytest.mark.parametrize("content", [b"{}", b"[]", b"{", b"7", b"\xff", b'{"model": "tiny"}'])
def test_unrecognized_invocation_is_refused(http: Any, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = http.request("POST", "/invocations", content=content, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_invocations_cost_no_more_than_the_matching_endpoint(http: Any) -> None:
    body = b'{"messages": [' + b"0," * 300_000 + b"0]}"
    headers = {"content-type": "application/json"}
    answer = http.request("POST", "/invocations", content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "body_too_complex")
    refused = http.post("/invocations", {"prompt": "hello", "logprob_token_ids": True})
    assert refused.json()["error"]["param"] == "logprob_token_ids"


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_ping_reports_whether_requests_can_be_served(
    http: Any, engines: Any, method: str
) -> None:
    assert http.request(method, "/ping").status_code == 200
    engines.ready = False
    assert http.request(method, "/ping").status_code == 503


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
@pytest.mark.parametrize("forced", [False, True])
def test_streams_end_with_usage_if_configured(http_of: Any, forced: bool, options: Any) -> None:
    settings = HttpConfig(enable_force_include_usage=forced)
    http = http_of(FrontEndConfig(model=ModelConfig(model="tiny"), http=settings))
    for path, body in (
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": [USER]}),
    ):
        *chunks, last = http.stream(path, {**body, "stream_options": options})
        assert all(bool(chunk.get("usage")) == forced for chunk in chunks)
        wanted = forced or bool((options or {}).get("include_usage"))
        assert bool(last.get("usage")) == wanted
