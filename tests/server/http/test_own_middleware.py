"""Operator middleware, and the load in response headers."""

import sys
import types
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.shared.config import ModelConfig
from engine.shared.messages import ClusterView, EngineEntry, EngineStats
from engine.shared.plugins import BadPlugin
from server.config import FrontEndConfig, GuardConfig, HttpConfig
from server.http.middleware import BadMiddleware
from tests.support.plugins import offer


class Refuses:
    """ASGI middleware that responds itself if a header requests it."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if (b"x-refuse", b"yes") in scope.get("headers", ()):
            await send({"type": "http.response.start", "status": 451, "headers": []})
            await send({"type": "http.response.body", "body": b"no"})
            return
        await self._app(scope, receive, send)


class Fails(Refuses):
    def __init__(self, app: Any) -> None:
        raise RuntimeError("no reason")


async def signs(request: Any, call_next: Any) -> Any:
    answer = await call_next(request)
    answer.headers["x-signed"] = request.url.path
    return answer


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> str:
    made = types.ModuleType("operators_own")
    made.Refuses, made.signs, made.number = Refuses, signs, 1  # type: ignore[attr-defined]
    made.Fails = Fails  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "operators_own", made)
    return "operators_own"


def settings(*middleware: str) -> FrontEndConfig:
    return FrontEndConfig(
        model=ModelConfig(model="tiny"),
        http=HttpConfig(middleware=middleware),
        guards=GuardConfig(api_key=("secret",)),
    )


def test_middleware_wraps_all_responses(http_of: Any, module: str) -> None:
    http = http_of(settings(f"{module}.Refuses", f"{module}.signs"))
    refused = http.post("/v1/completions", {"prompt": "x"}, headers={"x-refuse": "yes"})
    assert (refused.status_code, refused.text) == (451, "no")
    assert "x-request-id" in refused.headers
    for key, status in (("wrong", 401), ("secret", 200)):
        headers = {"authorization": f"Bearer {key}"}
        answer = http.post("/v1/completions", {"prompt": "x"}, headers=headers)
        assert answer.status_code == status
        assert answer.headers["x-signed"] == "/v1/completions"


@pytest.mark.parametrize(
    "path", ["", "operators_own.missing", "operators_own.number", "no_such_module.x"]
)
def test_invalid_middleware_is_named_at_start(http_of: Any, module: str, path: str) -> None:
    with pytest.raises(BadMiddleware, match=r"--middleware"):
        http_of(settings(path))


def test_middleware_can_come_from_a_package(
    http_of: Any, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(
        tmp_path, "swell.middleware", signer=f"{module}:signs", other=f"{module}:missing",
        own_signer=f"{module}:signs", fails=f"{module}:Fails",
    )  # fmt: skip
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("signer", "own-signer"):
        http = http_of(settings(name))
        assert http.get("/health").headers["x-signed"] == "/health"
    with pytest.raises(BadMiddleware, match=r"--middleware fails: RuntimeError: no reason"):
        http_of(settings("fails"))
    with pytest.raises(
        BadPlugin, match=r"--middleware nothing: .* are fails, other, own-signer, sign"
    ):
        http_of(settings("nothing"))
    with pytest.raises(BadPlugin, match=r"--middleware other: .*AttributeError"):
        http_of(settings("other"))


def stats(rank: int, waiting: int, running: int, usage: float) -> EngineEntry:
    of_engine = EngineStats(rank, 1, 1, 0, 0, waiting, running, usage, 0)
    return EngineEntry(rank, 1, True, "node", 0, None, of_engine)


def test_middleware_can_be_a_file(http_of: Any, tmp_path: Path) -> None:
    file = tmp_path / "gate.py"
    file.write_text(
        "async def signs(request, call_next):\n"
        "    answer = await call_next(request)\n"
        "    answer.headers['x-signed'] = request.url.path\n"
        "    return answer\n"
    )
    http = http_of(settings(f"{file}:signs"))
    assert http.get("/health").headers["x-signed"] == "/health"
    with pytest.raises(BadMiddleware, match="absent"):
        http_of(settings(f"{file}:absent"))
    with pytest.raises(BadMiddleware, match=r"\./FILE\.py:NAME"):
        http_of(settings("gate.signs"))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_answers_contain_the_load_on_request(http: Any, engines: Any, path: str, body: Any) -> None:
    headers = {"endpoint-load-metrics-format": "JSON"}
    response = http.post(path, body, headers=headers).headers["endpoint-load-metrics"]
    assert msgspec.json.decode(response.removeprefix("JSON "))["named_metrics"] == {
        "kv_cache_usage_perc": 0.0, "num_requests_waiting": 0, "num_requests_running": 0
    }  # fmt: skip
    entries = [stats(0, 2, 3, 0.5), stats(1, 1, 4, 0.25)]
    engines.view = ClusterView(1, 1, 0, True, [*entries], 1)
    headers = {"Endpoint-Load-Metrics-Format": "text"}
    response = http.post(path, {**body, "stream": True}, headers=headers)
    assert response.headers["endpoint-load-metrics"] == (
        "TEXT named_metrics.kv_cache_usage_perc=0.375, named_metrics.num_requests_waiting=3, "
        "named_metrics.num_requests_running=7"
    )
    for asked in ({}, {"endpoint-load-metrics-format": "xml"}):
        assert "endpoint-load-metrics" not in http.post(path, body, headers=asked).headers


def test_clients_without_a_key_get_no_load(http_of: Any) -> None:
    http = http_of(settings())
    headers = {"endpoint-load-metrics-format": "text"}
    refused = http.post("/v1/completions", {"prompt": "x"}, headers=headers)
    assert refused.status_code == 401
    assert "endpoint-load-metrics" not in refused.headers
