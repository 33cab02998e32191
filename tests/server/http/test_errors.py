from typing import Any

import pytest

from engine.shared.messages import RequestOutput
from server.router.generation_client import KillsEngines, NoEngineAvailable


def error_of(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return dict(error)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"not json",
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\\ud800"}',
        b"[]",
        b"5",
        b"null",
        b"[" * 100_000,
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_non_object_bodies_are_refused(http: Any, path: str, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    error_of(http.request("POST", path, content=body, headers=headers), 400)


def test_non_json_numbers_are_refused(http: Any) -> None:
    body = b'{"prompt": "x", "temperature": NaN}'
    headers = {"Content-Type": "application/json"}
    response = http.request("POST", "/v1/completions", content=body, headers=headers)
    assert error_of(response, 400)["param"] == "temperature"


def test_bodies_of_other_content_types_are_refused(http: Any) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    response = http.request("POST", "/v1/completions", content=b"{}", headers=headers)
    assert "application/json" in error_of(response, 415)["message"]


def test_wrong_method_names_the_allowed_one(http: Any) -> None:
    response = http.get("/v1/completions")
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


def test_context_length_error_states_the_excess(http: Any) -> None:
    error = error_of(http.post("/v1/completions", {"prompt": [5] * 500, "max_tokens": 13}), 400)
    assert error["code"] == "context_length_exceeded"
    for number in ("512", "513", "500", "13"):
        assert number in error["message"]
    assert http.complete(prompt=[5] * 500, max_tokens=12)
    error_of(http.post("/v1/completions", {"prompt": [5] * 512}), 400)


@pytest.mark.parametrize("stream", [False, True])
def test_without_engines_clients_get_a_retry_after(http: Any, engines: Any, stream: bool) -> None:
    engines.ready = False
    response = http.post("/v1/completions", {"prompt": "x", "stream": stream})
    error_of(response, 503)
    assert int(response.headers["retry-after"]) >= 1


def test_submitted_choices_are_closed_if_another_finds_no_engine(http: Any, engines: Any) -> None:
    engines.refuse_from = 2
    error_of(http.post("/v1/completions", {"prompt": "x", "n": 4}), 503)
    assert [stream.closed.is_set() for stream in engines.streams] == [True, True]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (NoEngineAvailable("gone"), 503),
        (RequestOutput(1, [], "error", error="secret detail"), 500),
        (RuntimeError("secret detail"), 500),
    ],
)
def test_failures_before_first_token_are_http_errors(
    http: Any, engines: Any, failure: Any, status: int, n: int
) -> None:
    engines.script = lambda stream: [failure]
    for stream in (False, True):
        response = http.post("/v1/completions", {"prompt": "x", "stream": stream, "n": n})
        error = error_of(response, status)
        assert "secret" not in error["message"]
    assert all(stream.closed.is_set() for stream in engines.streams)


def test_a_request_that_kills_engines_is_not_to_be_sent_again(http: Any, engines: Any) -> None:
    engines.script = lambda stream: [KillsEngines("two engines died of it")]
    response = http.post("/v1/completions", {"prompt": "x"})
    assert error_of(response, 500)["code"] == "request_kills_engines"
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_failures_in_a_stream_are_an_event_before_the_end(
    http: Any, engines: Any, path: str, body: Any
) -> None:
    engines.script = lambda stream: [RequestOutput(1, [70]), NoEngineAvailable("gone")]
    *chunks, failure = http.stream(path, body)
    assert chunks
    assert failure["error"]["type"] == "server_error"
    assert engines.streams[0].closed.is_set()
