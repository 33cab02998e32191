"""Requests for models of other servers, over real connections between two apps."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from engine.shared.config import ModelConfig
from server.api.services import make_services
from server.app import build_app
from server.config import FrontEndConfig, GuardConfig
from server.observe.metrics import FrontEndMetrics
from server.tenant_budget import TenantBudget
from server.upstreams.forwarder import MAX_CONNECTIONS, Forwarder
from server.upstreams.routes import ModelRoutes
from tests.server.conftest import FakeGenerationClient, Served, app_of, tiny
from tests.server.endpoints import ADMIN, ADMIN_KEY
from tests.support.waiting import until

KEY = {"authorization": "Bearer of-a-tenant"}
ASK = {"model": "other", "prompt": "hello", "max_tokens": 8}


class Fleet:
    """A server `here` with routes from the test, and one that serves the model `other`."""

    def __init__(
        self, tokenizer: Any, served: Served, directory: Path, stack: contextlib.ExitStack
    ) -> None:
        self._routes, self._tokenizer = directory / "routes.yaml", tokenizer
        self.engines = FakeGenerationClient(tokenizer)
        guards = GuardConfig(
            api_key=("of-a-tenant", "of-another"),
            admin_key=ADMIN_KEY,
            max_body_bytes_in_flight=1 << 18,
        )
        other = FrontEndConfig(
            model=ModelConfig(model="org/other", served_model_name=("other",)), guards=guards
        )
        self.there = stack.enter_context(served(app_of(other, self.engines, tokenizer)))
        self.route(other=self.there)
        here = tiny(guards=guards)
        self.own_engines = FakeGenerationClient(tokenizer)
        metrics = FrontEndMetrics(here)
        self.forwarder = forwarder = Forwarder(ModelRoutes(str(self._routes)), metrics)
        self.app = build_app(
            make_services(here, self.own_engines, tokenizer, metrics, forwarder=forwarder)
        )
        url = stack.enter_context(served(self.app, forwarder.close))
        self.url = url
        self.http = stack.enter_context(httpx.Client(base_url=url, headers=KEY, timeout=60))

    def route(self, **routes: str) -> None:
        self._routes.write_bytes(msgspec.json.encode(routes))


@pytest.fixture
def fleet(
    tokenizer: Any, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Fleet]:
    monkeypatch.setattr("server.upstreams.routes.CHECK_INTERVAL", 0.0)
    with contextlib.ExitStack() as stack:
        yield Fleet(tokenizer, served, tmp_path, stack)


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/completions", {"prompt": "hello"}, "text_completion"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]},
         "chat.completion"),
        ("/v1/responses", {"input": "hello"}, "response"),
        ("/invocations", {"prompt": "hello"}, "text_completion"),
    ],
)  # fmt: skip
def test_requests_go_to_the_server_with_the_model(
    fleet: Fleet, path: str, body: Any, kind: str
) -> None:
    asked = {"x-request-id": "mine"}
    answer = fleet.http.post(path, json={"model": "other", **body}, headers=asked)
    assert (answer.status_code, answer.json()["object"]) == (200, kind)
    assert answer.json()["model"] == "other"
    assert answer.headers.get_list("x-request-id") == ["mine"]
    assert (len(fleet.engines.streams), len(fleet.own_engines.streams)) == (1, 0)
    assert fleet.engines.streams[0].request_id == "mine"


def test_streams_and_lengths_are_forwarded_unchanged(fleet: Fleet) -> None:
    direct = httpx.post(
        fleet.there + "/v1/completions", json={**ASK, "stream": True}, headers=KEY, timeout=60
    )
    through = fleet.http.post("/v1/completions", json={**ASK, "stream": True})
    assert through.headers["content-type"] == direct.headers["content-type"]
    assert through.text.count("data: ") == direct.text.count("data: ") > 3
    assert through.text.endswith("data: [DONE]\n\n")
    whole = fleet.http.post("/v1/completions", json=ASK)
    assert int(whole.headers["content-length"]) == len(whole.content)


def test_errors_of_the_other_server_reach_the_client(fleet: Fleet) -> None:
    refused = fleet.http.post("/v1/completions", json={**ASK, "n": 0})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
    fleet.engines.ready = False
    busy = fleet.http.post("/v1/completions", json=ASK)
    assert busy.status_code == 503
    assert busy.headers["retry-after"]


def test_models_of_all_servers_are_listed(fleet: Fleet) -> None:
    listed = fleet.http.get("/v1/models").json()["data"]
    assert [each["id"] for each in listed] == ["tiny", "other"]
    assert fleet.http.get("/v1/models/other").json()["id"] == "other"
    assert fleet.http.get("/v1/models/neither").status_code == 404


def test_models_are_added_and_taken_away_while_serving(fleet: Fleet) -> None:
    fleet.route()
    gone = fleet.http.post("/v1/completions", json=ASK)
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
    fleet.route(other=fleet.there)
    assert fleet.http.post("/v1/completions", json=ASK).status_code == 200


def test_local_models_are_not_forwarded(fleet: Fleet) -> None:
    fleet.route(tiny=fleet.there)
    assert fleet.http.post("/v1/completions", json={**ASK, "model": "tiny"}).status_code == 200
    assert (len(fleet.engines.streams), len(fleet.own_engines.streams)) == (0, 1)


def test_key_is_required_before_forwarding(fleet: Fleet) -> None:
    answer = httpx.post(fleet.url + "/v1/completions", json=ASK, timeout=60)
    assert answer.status_code == 401
    assert not fleet.engines.streams


def test_admin_requests_are_never_forwarded(fleet: Fleet) -> None:
    paths = ["/admin/scale", "/admin/utilities", "/v1/load_lora_adapter"]
    with listening() as (url, seen):
        fleet.route(other=url)
        for path in paths:
            fleet.http.post(path, json=ASK, headers=ADMIN)
        assert not seen.is_set()


def test_requests_are_not_forwarded_in_a_loop(fleet: Fleet) -> None:
    fleet.route(neither=fleet.url)
    answer = fleet.http.post("/v1/completions", json={**ASK, "model": "neither"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_unreachable_server_is_a_503_with_reason(fleet: Fleet) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and does not listen
        fleet.route(other=f"http://127.0.0.1:{held.getsockname()[1]}")
        answer = fleet.http.post("/v1/completions", json=ASK)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "service_unavailable")
    assert "'other'" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"]
    [line] = [
        line
        for line in fleet.http.get("/metrics", headers=ADMIN).text.splitlines()
        if line.startswith("swell_forwarded_requests_total")
    ]
    assert 'model="other"' in line
    assert 'status="503"' in line


def test_client_disconnect_is_forwarded(fleet: Fleet) -> None:
    first = fleet.engines.tokens([20, 21])
    fleet.engines.script = lambda stream: first(stream)[:1]
    with fleet.http.stream("POST", "/v1/completions", json={**ASK, "stream": True}) as answer:
        assert answer.status_code == 200
        until(lambda: bool(fleet.engines.streams), "it runs")
    until(lambda: fleet.engines.streams[0].closed.is_set(), "it was aborted")


def test_truncated_answer_is_an_error(fleet: Fleet) -> None:
    with listening(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{") as (url, _):
        fleet.route(other=url)
        with pytest.raises(httpx.RemoteProtocolError):
            fleet.http.post("/v1/completions", json=ASK)


@pytest.mark.parametrize(
    ("path", "body", "last"),
    [
        (
            "/v1/completions",
            ASK,
            'data: {"error":{"message":"The connection to the model\'s server',
        ),
        ("/v1/messages", {**ASK, "messages": []}, 'event: error\ndata: {"type":"error","error":{'),
    ],
)
def test_a_stream_that_breaks_off_between_events_ends_with_an_error(
    fleet: Fleet, path: str, body: Any, last: str
) -> None:
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    with listening(head + b"a\r\ndata: {}\n\n\r\n") as (url, _):
        fleet.route(other=url)
        answer = fleet.http.post(path, json={**body, "stream": True})
        first, second, end = answer.text.split("\n\n")
        assert (first, end) == ("data: {}", "")
        assert second.startswith(last)
    with listening(head + b"5\r\ndata:\r\n") as (url, _):
        fleet.route(other=url)
        with pytest.raises(httpx.RemoteProtocolError):
            fleet.http.post(path, json={**body, "stream": True})


def test_bodies_waiting_for_other_server_are_bounded(fleet: Fleet) -> None:
    large, go_on = {**ASK, "user": "x" * 600_000}, threading.Event()
    with (
        listening(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", go_on) as (url, came),
        ThreadPoolExecutor() as clients,
    ):
        fleet.route(other=url)
        first = clients.submit(fleet.http.post, "/v1/completions", json=large)
        assert came.wait(60)
        second = fleet.http.post("/v1/completions", json=large)
        go_on.set()
        assert first.result(60).status_code == 200
    assert (second.status_code, second.json()["error"]["code"]) == (503, "service_unavailable")


def test_connections_to_other_servers_are_bounded(
    tokenizer: Any, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.upstreams.routes.CHECK_INTERVAL", 0.0)
    monkeypatch.setattr("server.upstreams.forwarder.MAX_CONNECTIONS", 1)
    monkeypatch.setattr("server.upstreams.forwarder._POOL_SECONDS", 0.1)
    go_on = threading.Event()
    with (
        contextlib.ExitStack() as stack,
        listening(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", go_on) as (url, came),
        ThreadPoolExecutor() as clients,
    ):
        fleet = Fleet(tokenizer, served, tmp_path, stack)
        fleet.route(other=url)
        first = clients.submit(fleet.http.post, "/v1/completions", json=ASK)
        assert came.wait(60)
        second = fleet.http.post("/v1/completions", json=ASK)
        go_on.set()
        assert first.result(60).status_code == 200
    assert (second.status_code, second.json()["error"]["code"]) == (503, "service_unavailable")


def test_requests_of_one_tenant_leave_connections_to_others(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet.forwarder, "_requests", TenantBudget(1, MAX_CONNECTIONS))
    go_on = threading.Event()
    with (
        listening(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", go_on) as (url, came),
        ThreadPoolExecutor() as clients,
    ):
        fleet.route(other=fleet.there, slow=url)
        first = clients.submit(fleet.http.post, "/v1/completions", json={**ASK, "model": "slow"})
        assert came.wait(60)
        second = fleet.http.post("/v1/completions", json=ASK)
        headers = {"authorization": "Bearer of-another"}
        of_another = fleet.http.post("/v1/completions", json=ASK, headers=headers)
        go_on.set()
        assert first.result(60).status_code == 200
    assert (second.status_code, second.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert of_another.status_code == 200
    assert fleet.http.post("/v1/completions", json=ASK).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": 7, "prompt": "x"}',
        b'{"model": null, "prompt": "x", "n": 0}',
        b'{"model": ["other"], "prompt": "x"}',
        b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b', "model": "other"}',
        b'{"model": "\xff"}',
        b'["other"]',
        b"{",
    ],
)
def test_request_without_model_is_refused_locally(fleet: Fleet, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = fleet.http.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 400
    assert not fleet.engines.streams


def whole(received: bytes) -> bool:
    head, _, body = received.partition(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
    return bool(length) and len(body) >= int(length)


@contextlib.contextmanager
def listening(
    answer: bytes = b"", go_on: threading.Event | None = None
) -> Iterator[tuple[str, threading.Event]]:
    """A server that sends the same bytes to every client and records whether any connected.

    It reads entire requests and answers after `go_on`.
    """
    came = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    came.set()
                    with connection:
                        received = b""
                        while not whole(received) and (more := connection.recv(1 << 16)):
                            received += more
                        assert go_on is None or go_on.wait(60)
                        connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", came
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
    thread.join(60)
