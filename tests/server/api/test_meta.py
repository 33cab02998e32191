import asyncio
import threading
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from engine.shared.version import PROTOCOL_VERSION, SWELL_VERSION
from server.config import FrontEndConfig, GuardConfig, StoreConfig
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import ServedTokenizer


def test_models_are_listed_and_found(http: Any) -> None:
    body = http.get("/v1/models").json()
    assert body["object"] == "list"
    assert [model["id"] for model in body["data"]] == ["tiny", "also-tiny"]
    model = http.get("/v1/models/also-tiny").json()
    assert (model["object"], model["max_model_len"], model["root"]) == ("model", 512, "tiny")


def test_live_process_is_healthy_without_engines(http: Any, engines: Any) -> None:
    assert http.get("/ready").status_code == 200
    engines.ready = False
    assert http.get("/health").status_code == 200
    response = http.get("/ready")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "service_unavailable"
    assert "retry-after" in response.headers
    assert http.get("/v1/models").json()["data"][0]["max_model_len"] is None


def test_the_version_is_returned(http: Any) -> None:
    assert http.get("/version").json() == {"version": SWELL_VERSION, "protocol": PROTOCOL_VERSION}


def test_text_is_tokenized_and_detokenized(http: Any, engines: Any) -> None:
    text = "hello 你好 🙂"
    body = http.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == 512
    assert http.post("/detokenize", {"tokens": body["tokens"]}).json() == {"prompt": text}


def test_conversations_are_tokenized(http: Any) -> None:
    messages = [{"role": "user", "content": "hello"}]
    body = http.post("/tokenize", {"messages": messages}).json()
    text = http.post("/detokenize", {"tokens": body["tokens"]}).json()["prompt"]
    assert text == "<|user|>hello<|end|><|assistant|>"
    body = {"messages": messages, "add_generation_prompt": False}
    tokens = http.post("/tokenize", body).json()["tokens"]
    text = http.post("/detokenize", {"tokens": tokens, "skip_special_tokens": True}).json()
    assert text["prompt"] == "hello"


def test_openapi_document_is_built_in_a_thread_on_first_read(app: FastAPI) -> None:
    assert app.openapi_schema is None
    made_in = []
    document = app.openapi

    def note() -> dict[str, Any]:
        made_in.append(threading.current_thread())
        return document()

    app.openapi = note  # type: ignore[method-assign]

    async def read_by_many() -> list[bytes]:
        serving = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=serving, base_url="http://test") as client:
            answers = await asyncio.gather(*(client.get("/openapi.json") for _ in range(8)))
        return [answer.content for answer in answers]

    first, *others = asyncio.run(read_by_many()) + asyncio.run(read_by_many())
    assert b'"/v1/completions"' in first
    assert set(others) == {first}
    [thread] = made_in  # and rendered only once
    assert thread is not threading.main_thread()


def test_openapi_document_describes_every_path_with_bodies_and_errors(
    app: FastAPI, http: Any
) -> None:
    document = http.get("/openapi.json").json()
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    served = {route.path_format for route in routes if route.include_in_schema}
    assert {"/v1/completions", "/v1/models/{model_id}", "/metrics/engine/{rank}"} <= served
    assert document["paths"].keys() == served
    create = document["paths"]["/v1/chat/completions"]["post"]
    body = create["requestBody"]["content"]["application/json"]["schema"]
    assert body["$ref"].endswith("/ChatCompletionRequest")
    assert set(create["responses"]) == {
        "200", "400", "401", "404", "413", "415", "429", "500", "503"
    }  # fmt: skip
    assert set(create["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    for reference in _references(document):
        name = reference.removeprefix("#/components/schemas/")
        assert name in document["components"]["schemas"]


def _references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [found for value in node.values() for found in _references(value)]
    if isinstance(node, list):
        return [found for value in node for found in _references(value)]
    return []


class TestWithoutTemplate:
    @pytest.fixture
    def tokenizer(self, tokenizer: ServedTokenizer) -> ServedTokenizer:
        return ServedTokenizer(tokenizer.backend, eos_token_ids=sorted(tokenizer.eos_token_ids))

    def test_chat_without_template_is_refused_with_reason(self, http: Any) -> None:
        body = {"messages": [{"role": "user", "content": "x"}]}
        response = http.post("/v1/chat/completions", body)
        assert response.status_code == 400
        assert "chat template" in response.json()["error"]["message"]


class TestWithStrictTemplate:
    @pytest.fixture
    def tokenizer(self, tokenizer: ServedTokenizer) -> ServedTokenizer:
        source = "{% if messages|length > 1 %}{{ raise_exception('one at a time') }}{% endif %}x"
        return ServedTokenizer(
            tokenizer.backend,
            eos_token_ids=sorted(tokenizer.eos_token_ids),
            chat_template=ChatTemplate(source, {}),
        )

    def test_template_error_is_returned_by_chat(self, http: Any) -> None:
        body = {"messages": [{"role": "user", "content": "x"}] * 2}
        error = http.post("/v1/chat/completions", body).json()["error"]
        assert error["param"] == "messages"
        assert "one at a time" in error["message"]


def test_load_is_zero_without_requests(http: Any) -> None:
    assert http.get("/load").json() == {"server_load": 0, "server_load_tokens": 0}


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hunter2@host/db",
        "postgresql://me:hunter2/x@host/db",
        "postgresql://host/db?user=me&password=hunter2",
        "postgresql://host/db?pass%77ord=hunter2&sslmode=require",
    ],
)
def test_settings_are_shown_to_administrators_without_secrets(
    http: Any, http_of: Any, config: FrontEndConfig, url: str
) -> None:
    assert http.get("/server_info").status_code == 404
    guards = GuardConfig(api_key=("sesame",), admin_key="open")
    store = StoreConfig(response_store=url)
    guarded = http_of(msgspec.structs.replace(config, guards=guards, store=store))
    assert guarded.get("/server_info").status_code == 403
    plain = {"authorization": "Bearer sesame"}
    assert guarded.get("/server_info", headers=plain).status_code == 403
    shown = guarded.get("/server_info", headers={"authorization": "Bearer open"})
    assert shown.json()["config"]["model"]["model"] == "org/tiny"
    assert "sesame" not in shown.text
    assert "hunter2" not in shown.text
    assert '"open"' not in shown.text


def test_tokenizer_info_is_shown_if_configured(
    http: Any, http_of: Any, config: FrontEndConfig
) -> None:
    assert http.get("/tokenizer_info").status_code == 404
    shows = msgspec.structs.replace(config.http, enable_tokenizer_info_endpoint=True)
    info = http_of(msgspec.structs.replace(config, http=shows)).get("/tokenizer_info").json()
    assert info["vocab_size"] > 0
    assert "<|eos|>" in info["special_tokens"]
    assert "message.role" in info["chat_template"]
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
