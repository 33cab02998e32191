"""No body makes more of itself than a few times its size."""

import json
import tracemalloc
from typing import Any

import pytest

from server.access.limits import MAX_JSON_DEPTH, MAX_JSON_VALUES, MAX_MESSAGES, MAX_PARTS
from server.api.admin.schema import ScaleRequest, UtilityRequest
from server.api.chat.schema import ChatCompletionRequest
from server.api.completions.schema import CompletionRequest
from server.api.conversations.schema import ConversationRequest, ItemsRequest, MetadataRequest
from server.api.messages.schema import CountTokensRequest, MessagesRequest
from server.api.responses.schema import ResponsesRequest
from server.api.shared.body import RequestBody
from server.api.tokenize.schema import DetokenizeRequest, TokenizeRequest

MODELS = (
    CompletionRequest, ChatCompletionRequest, ResponsesRequest, TokenizeRequest,
    MessagesRequest, CountTokensRequest, ConversationRequest, ItemsRequest, MetadataRequest,
    DetokenizeRequest, UtilityRequest, ScaleRequest,
)  # fmt: skip
PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/responses/input_tokens",
    "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize",
)  # fmt: skip
ZEROS = b"0," * 10**6 + b"0"
FIELDS = (b"messages", b"input", b"prompt", b"tokens", b"tools", b"documents", b"stop", b"unknown")


def unbounded(schema: Any, path: str) -> list[str]:
    """Return the places of a core schema where a text, list or object has no largest length."""
    if isinstance(schema, (list, tuple)):
        return [found for each in schema for found in unbounded(each, path)]
    if not isinstance(schema, dict):
        return []
    found = []
    kind = schema.get("type")
    if isinstance(kind, str) and kind in ("str", "list", "dict"):
        if "max_length" not in schema:
            found.append(path)
        if kind == "list" and not schema.get("fail_fast"):
            found.append(f"{path} goes on after the first error")
    inner = ((name, each) for name, each in schema.items() if name != "metadata")
    return found + [bad for name, each in inner for bad in unbounded(each, f"{path}.{name}")]


@pytest.mark.parametrize("model", MODELS)
def test_every_text_list_and_object_has_a_largest_length(model: type[RequestBody]) -> None:
    assert unbounded(model.__pydantic_core_schema__, model.__name__) == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("field", FIELDS)
def test_two_megabytes_of_zeros_do_not_become_a_gigabyte(
    http: Any, path: str, field: bytes
) -> None:
    body = b'{"%s":[%s]}' % (field, ZEROS)
    headers = {"Content-Type": "application/json"}
    tracemalloc.start()
    answer = http.request("POST", path, content=body, headers=headers)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error.get("code", "body_too_complex") == "body_too_complex"
    assert peak < 4 * len(body) + 2**22


@pytest.mark.parametrize("path", PATHS)
def test_validation_stops_at_the_first_wrong_element(http: Any, path: str) -> None:
    wrong = [None] * (MAX_MESSAGES - 1)
    body = {name.decode(): wrong for name in FIELDS}
    tracemalloc.start()
    answer = http.post(path, body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert answer.status_code == 400
    assert peak < 2**22


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user"}] * (MAX_MESSAGES + 1)}, "messages"),
        ("/v1/responses", {"input": [{"role": "user"}] * (MAX_MESSAGES + 1)}, "input"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 2000}]},
            "messages[0].content",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x", "name": "n" * 2000}]},
            "messages[0].name",
        ),
    ],
)
def test_what_is_too_much_is_named(http: Any, path: str, body: Any, param: str) -> None:
    answer = http.post(path, body)
    assert answer.status_code == 400
    assert (answer.json()["error"]["param"] or "").startswith(param.split("[")[0])


def call(arguments: str) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    "arguments",
    [
        ["[" * 5000],
        ['{"a":' + "[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH + "}"],
        ['{"a":[' + "0," * MAX_JSON_VALUES + "0]}"],
        ['{"a":[' + "0," * (MAX_JSON_VALUES // 4) + "0]}"] * 5,
    ],
    ids=["nested", "too deep", "too many", "too many in all"],
)
def test_arguments_of_calls_are_no_way_around_it(http: Any, arguments: list[str]) -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [call(each) for each in arguments]}
    answer = http.post("/tokenize", {"messages": [{"role": "user", "content": "x"}, turn]})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "body_too_complex"
    assert error["param"].startswith("messages[1].tool_calls[")


def test_a_text_that_is_far_too_long_is_not_tokenized(http: Any) -> None:
    answer = http.post("/tokenize", {"prompt": "qx" * 2**20})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert http.post("/tokenize", {"prompt": "qx" * 2**15}).json()["count"] >= 2**15


def test_a_long_conversation_is_rendered_whole(http: Any) -> None:
    parts = [{"type": "text", "text": "p"}] * MAX_PARTS
    messages = [{"role": "user", "content": "hello"}] * (MAX_MESSAGES - 1)
    messages.append({"role": "user", "content": parts})  # type: ignore[dict-item]
    answer = http.post("/tokenize", {"messages": messages})
    assert answer.status_code == 200, json.dumps(answer.json())[:500]
    assert answer.json()["count"] > MAX_MESSAGES
