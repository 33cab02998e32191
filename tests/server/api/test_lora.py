"""Adapters over HTTP: named as models, loaded and unloaded by administrators."""

from typing import Any

import pytest
from msgspec.structs import replace

from engine.shared.config import MAX_NAME_SIZE
from engine.shared.messages import (
    AdapterEntry,
    AdapterOutcome,
    AdaptersInUse,
    AdaptersView,
    AdapterTable,
)
from server.api.admin.schema import MAX_PATH_SIZE
from server.config import FrontEndConfig, GuardConfig
from tests.server.conftest import FakeGenerationClient

ADMIN = {"headers": {"authorization": "Bearer open"}}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def engines(engines: FakeGenerationClient) -> FakeGenerationClient:
    """Fake engines with an adapter named sql."""
    entry = AdapterEntry(1, "sql", "/adapters/sql", "ab12", "serving")
    engines.adapters.take(AdaptersView(AdapterTable(1, [entry])))
    return engines


@pytest.fixture
def admin(http_of: Any, config: FrontEndConfig) -> Any:
    return http_of(replace(config, guards=GuardConfig(admin_key="open")))


def leased(engines: FakeGenerationClient) -> list[str]:
    """Return the adapter versions held by requests in flight."""
    in_use = engines.adapters.notice(0.0)
    assert isinstance(in_use, AdaptersInUse)
    return in_use.versions


def test_a_request_that_names_an_adapter_is_computed_with_it(
    http: Any, engines: FakeGenerationClient
) -> None:
    assert http.complete(model="sql", n=2)["model"] == "sql"
    assert http.chat(model="sql")["model"] == "sql"
    assert http.complete()["model"] == "tiny"
    message = {"model": "sql", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
    assert http.post("/v1/messages", message).json()["model"] == "sql"
    assert http.post("/v1/responses", {"model": "sql", "input": "x"}).json()["model"] == "sql"
    beams = {"use_beam_search": True, "n": 2, "temperature": 0, "max_tokens": 2}
    assert http.post("/v1/completions", {"model": "sql", "prompt": "x", **beams}).is_success
    used = [stream.adapter for stream in engines.streams]
    assert used[:6] == ["ab12", "ab12", "ab12", "", "ab12", "ab12"]
    assert set(used[6:]) == {"ab12"}
    assert leased(engines) == [], "no lease is left"


def test_a_stream_names_its_adapter_in_every_chunk(http: Any) -> None:
    events = http.stream("/v1/completions", {"model": "sql", "prompt": "x"})
    assert {event["model"] for event in events} == {"sql"}


def test_unknown_adapter_is_not_found(http: Any, engines: FakeGenerationClient) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/tokenize": {"prompt": "x"},
    }
    for path, body in bodies.items():
        answer = http.post(path, {"model": "law", **body})
        assert answer.status_code == 404
        assert answer.json()["error"]["param"] == "model"
        assert http.post(path, {"model": "sql", **body}).is_success
    assert leased(engines) == []


def test_adapters_are_listed_with_their_parent(http: Any) -> None:
    models = {each["id"]: each for each in http.get("/v1/models").json()["data"]}
    assert models.keys() == {"tiny", "also-tiny", "sql"}
    assert (models["sql"]["parent"], models["sql"]["root"]) == ("tiny", "/adapters/sql")
    assert models["tiny"]["parent"] is None
    assert http.get("/v1/models/sql").json() == models["sql"]
    assert http.get("/v1/models/law").status_code == 404


def test_adapter_changes_are_complete_before_the_answer(
    admin: Any, engines: FakeGenerationClient
) -> None:
    answer = admin.post(LOAD, {"lora_name": "law", "lora_path": "law"}, **ADMIN)
    assert answer.text == "Success: LoRA adapter 'law' added successfully."
    answer = admin.post(
        LOAD, {"lora_name": "sql", "lora_path": "/x", "load_inplace": True}, **ADMIN
    )
    assert answer.is_success
    answer = admin.post(UNLOAD, {"lora_name": "sql", "lora_int_id": 3}, **ADMIN)
    assert answer.text == "Success: LoRA adapter 'sql' removed successfully."
    assert engines.changes == [("law", "law", False), ("sql", "/x", True), ("sql", None, False)]


def test_failed_adapter_change_is_an_error_with_reason(
    admin: Any, engines: FakeGenerationClient
) -> None:
    for status, path in ((400, LOAD), (503, LOAD), (404, UNLOAD)):
        engines.outcome = AdapterOutcome(1, status, "because")
        answer = admin.post(path, {"lora_name": "law", "lora_path": "law"}, **ADMIN)
        assert answer.status_code == status
        assert answer.json()["error"]["message"] == "because"


def test_only_administrators_change_adapters(http: Any, admin: Any) -> None:
    for path in (LOAD, UNLOAD):
        body = {"lora_name": "law", "lora_path": "law"}
        assert http.post(path, body).status_code == 404
        assert admin.post(path, body).status_code == 403


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "lora_name"),
        ({"lora_name": "", "lora_path": "x"}, "lora_name"),
        ({"lora_name": "x" * (MAX_NAME_SIZE + 1), "lora_path": "x"}, "lora_name"),
        ({"lora_name": ["x"], "lora_path": "x"}, "lora_name"),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": "x", "lora_path": 7}, "lora_path"),
        ({"lora_name": "x", "lora_path": "/" * (MAX_PATH_SIZE + 1)}, "lora_path"),
        ({"lora_name": "x", "lora_path": "a\0b"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "x", "load_inplace": "yes"}, "load_inplace"),
        ({"lora_name": "tiny", "lora_path": "x"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "x", "base_model_name": "other"}, "base_model_name"),
    ],
)
def test_invalid_bodies_are_refused_by_field_name(
    admin: Any, engines: FakeGenerationClient, body: dict[str, Any], param: str
) -> None:
    answer = admin.post(LOAD, body, **ADMIN)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert engines.changes == []


def test_an_adapter_with_the_models_own_name_does_not_shadow_it(
    http: Any, engines: FakeGenerationClient
) -> None:
    entry = AdapterEntry(2, "tiny", "/x", "cd34", "serving")
    engines.adapters.take(AdaptersView(AdapterTable(2, [entry])))
    http.complete(model="tiny")
    assert engines.streams[-1].adapter == ""
    listed = [each["id"] for each in http.get("/v1/models").json()["data"]]
    assert listed == ["tiny", "also-tiny"]
