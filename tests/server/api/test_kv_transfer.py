"""KV blocks transferred between servers by an external router."""

from typing import Any

import msgspec
import pytest

from engine.shared.messages import KvSource
from server.config import FrontEndConfig
from server.router.generation_client import KvOffer
from tests.server.conftest import FakeGenerationClient, Http

PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello there, how are you today?"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello there"}]},
}
FIRST = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
"""The request of vLLM's routers to the prefill server."""
SECOND = {
    "do_remote_decode": False, "do_remote_prefill": True, "remote_engine_id": "beef",
    "remote_block_ids": [0, 1], "remote_host": "10.0.0.7", "remote_port": 4000,
    "remote_request_id": "r", "tp_size": 1,
}  # fmt: skip


@pytest.fixture
def allows() -> bool:
    return True


@pytest.fixture
def config(config: FrontEndConfig, allows: bool) -> FrontEndConfig:
    routing = msgspec.structs.replace(config.routing, allow_kv_transfer_params=allows)
    return msgspec.structs.replace(config, routing=routing)


@pytest.fixture
def http(app: Any, engines: FakeGenerationClient) -> Http:
    engines.offers = {0: KvOffer(KvSource("tcp://10.0.0.7:4000", 0xBEEF), 4)}
    return Http(app)


def post(http: Http, path: str, params: object, **more: Any) -> Any:
    body = {"model": "tiny", "max_tokens": 1, **PATHS[path], **more}
    return http.post(path, {**body, "kv_transfer_params": params})


@pytest.mark.parametrize("path", PATHS)
def test_transfer_params_of_prefill_answer_fit_decode_request(
    path: str, http: Http, engines: FakeGenerationClient
) -> None:
    answer = post(http, path, FIRST)
    assert answer.status_code == 200
    assert engines.streams[0].message.offers_blocks
    said = answer.json()
    params = said["kv_transfer_params"]
    num_blocks = (said["usage"]["prompt_tokens"] - 1) // 4
    assert params == {
        "remote_engine_id": "beef", "remote_block_ids": list(range(num_blocks)),
        "remote_request_id": params["remote_request_id"], "remote_host": "10.0.0.7",
        "remote_port": 4000, "do_remote_prefill": True, "do_remote_decode": False, "tp_size": 1,
    }  # fmt: skip
    answer = post(http, path, params, stream=True)
    assert answer.status_code == 200
    assert engines.streams[1].message.kv_source == KvSource("tcp://10.0.0.7:4000", 0xBEEF)
    assert not engines.streams[1].message.offers_blocks


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("allows", [False])
@pytest.mark.parametrize("params", [FIRST, SECOND, {}], ids=["first", "second", "empty"])
def test_transfer_params_are_refused_without_permission(
    path: str, params: object, http: Http, engines: FakeGenerationClient
) -> None:
    answer = post(http, path, params)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "kv_transfer_params"
    assert "--allow-kv-transfer-params" in answer.json()["error"]["message"]
    assert not engines.streams


@pytest.mark.parametrize(
    ("params", "more"),
    [
        ({**FIRST, "do_remote_prefill": True}, {}),
        (FIRST, {"stream": True}),
        (FIRST, {"n": 2}),
        ({**SECOND, "remote_host": None}, {}),
        ({**SECOND, "remote_host": "a/b"}, {}),
        ({**SECOND, "remote_host": "a;tcp://b"}, {}),
        ({**SECOND, "remote_port": 70_000}, {}),
        ({**SECOND, "remote_engine_id": "no number"}, {}),
        ({**SECOND, "remote_engine_id": "-1"}, {}),
        ({**SECOND, "remote_engine_id": "f" * 40}, {}),
        ("yes", {}),
    ],
)
def test_invalid_transfer_params_are_refused(
    params: object, more: dict[str, Any], http: Http, engines: FakeGenerationClient
) -> None:
    answer = post(http, "/v1/completions", params, **more)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("kv_transfer_params")
    assert not engines.streams


def test_engines_without_tcp_offers_are_not_asked_for_transfer(
    http: Http, engines: FakeGenerationClient
) -> None:
    engines.offers = {0: KvOffer(KvSource("ipc:///private/blocks", 1), 4)}
    answer = post(http, "/v1/completions", FIRST)
    assert answer.status_code == 400
    assert "--kv-role" in answer.json()["error"]["message"]


def test_an_exited_engine_returns_no_transfer_parameters(
    http: Http, engines: FakeGenerationClient
) -> None:
    engines.offers = {3: engines.offers[0]}
    answer = post(http, "/v1/completions", FIRST)
    assert answer.json()["kv_transfer_params"] is None


def test_null_requests_no_transfer(http: Http, engines: FakeGenerationClient) -> None:
    answer = post(http, "/v1/completions", None)
    assert answer.status_code == 200
    assert "kv_transfer_params" not in answer.json()
