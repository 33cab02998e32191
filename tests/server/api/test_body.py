"""The cost of reading a body does not grow with the number of missing fields."""

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import pydantic_core
import pytest

from server import json_price
from server.api import route as bodies
from server.api.completions.schema import CompletionRequest
from server.api.messages.schema import CountTokensRequest, MessagesRequest
from server.api.responses.parse import _content as content_of
from server.api.responses.schema import ResponsesRequest
from server.api.route import read_body
from server.api.tokenize import DetokenizeRequest
from server.api.vectors.schema import ClassifyRequest, EmbeddingsRequest
from server.errors import ApiError
from server.schema.body import RequestBody


def refusal(model: type[RequestBody], body: bytes) -> tuple[str, str | None]:
    with pytest.raises(ApiError) as raised:
        asyncio.run(read_body(model, body))
    return str(raised.value), raised.value.param


@pytest.mark.parametrize(
    "model", [CompletionRequest, MessagesRequest, CountTokensRequest, DetokenizeRequest]
)
@pytest.mark.parametrize("given", ['"other": 1', '"messages": []', '"model": "m"'])
def test_large_body_without_a_field_is_refused_like_a_small_one(
    model: type[RequestBody], given: str
) -> None:
    large = "[" + "300," * 20_000 + "300]"
    small, padded = f"{{{given}}}", f'{{{given}, "unknown": {large}}}'
    assert refusal(model, padded.encode()) == refusal(model, small.encode())


def test_a_large_body_with_all_required_fields_is_read() -> None:
    large = "[" + "300," * 20_000 + "300]"
    body = asyncio.run(read_body(CompletionRequest, f'{{"prompt": {large}}}'.encode()))
    assert body.prompt == [300] * 20_001


def test_large_body_that_is_no_object_gets_validation_error() -> None:
    wrong = ("[" + "300," * 20_000 + "300]").encode()
    message, param = refusal(CompletionRequest, wrong)
    assert param is None
    assert "object" in message


@pytest.mark.parametrize("piece", [b"0,", b'",",', b"[],", rb'"\\\"[",'])
def test_other_requests_run_while_a_large_body_is_priced(piece: bytes) -> None:
    body = b'{"prompt":[' + piece * 30_000 + b"0]}"

    assert asyncio.run(turns_of(read_body(CompletionRequest, body))) > len(body) // 2**15


def test_large_invalid_body_is_parsed_only_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = "[" + "300," * 20_000 + "-1]"
    parsed: list[object] = []
    monkeypatch.setattr(pydantic_core, "from_json", parsed.append)
    message, param = refusal(MessagesRequest, f'  {{"other": {ids}}}'.encode())
    assert (message, param) == ("model: is required", "model")
    wrong = f'{{"model": "m", "max_tokens": 1, "messages": [{{"role": "user", "content": {ids}}}]}}'
    assert refusal(MessagesRequest, wrong.encode())[1] == "messages[0].content[0]"
    assert not parsed


def test_validation_error_is_reported_despite_invalid_numbers() -> None:
    body = b'{"prompt": [1, 2, -1], "temperature": 1e999, "other": [NaN]}'
    assert refusal(CompletionRequest, body)[1] in ("prompt[2]", "temperature")


IDS = "[" + "300, " * 20_000 + "7]"
LISTS = "[" + f"[{'12,' * 2_000}3]," * 20 + "[4]]"


def shown_to(model: type[RequestBody], monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return a list that receives every validated string."""
    seen: list[bytes] = []
    check = model.model_validate_json

    def noted(text: bytes) -> RequestBody:
        seen.append(text)
        return check(text)

    monkeypatch.setattr(model, "model_validate_json", noted)
    return seen


async def turns_of(reading: Coroutine[Any, Any, object]) -> int:
    """Return how often other tasks run on the event loop during an operation."""
    task = asyncio.create_task(reading)
    count = 0
    while not task.done():
        await asyncio.sleep(0)
        count += 1
    await asyncio.wait([task])
    assert task.exception() is None or isinstance(task.exception(), ApiError)
    return count


@pytest.mark.parametrize(
    ("model", "field", "text"),
    [
        (CompletionRequest, "prompt", IDS),
        (CompletionRequest, "prompt", LISTS),
        (CompletionRequest, "prompt", f"[{IDS},[1],{IDS}]"),
        (DetokenizeRequest, "tokens", IDS),
        (EmbeddingsRequest, "input", IDS),
        (EmbeddingsRequest, "input", LISTS),
        (ClassifyRequest, "input", LISTS),
    ],
)
def test_token_ids_are_parsed_in_parts(
    monkeypatch: pytest.MonkeyPatch, model: type[RequestBody], field: str, text: str
) -> None:
    body = f'{{"model": "m", "{field}": {text}, "unknown": {IDS}}}'.encode()
    monkeypatch.setattr(bodies, "_PART_BYTES", 1000)
    monkeypatch.setattr(bodies, "LARGE", 5000)
    seen = shown_to(model, monkeypatch)
    read = asyncio.run(read_body(model, body))
    assert getattr(read, field) == json.loads(text)
    assert sum(map(len, seen)) < 1000, "pydantic does not see them at all"
    priced = len(body) // json_price._PART_BYTES
    assert asyncio.run(turns_of(read_body(model, body))) >= priced + len(text) // 6000


@pytest.mark.parametrize("wrong", ["-1", "2147483648", "1.5", "true", '"a"', "[1]", "null", "[]"])
@pytest.mark.parametrize("place", [0, 1, 20_000])
@pytest.mark.parametrize("field", ["prompt", "stop_token_ids"])
def test_invalid_token_id_is_named_as_in_a_small_body(wrong: str, place: int, field: str) -> None:
    ids = ["300"] * 20_001
    ids[place] = wrong
    rest = '"model": "m"' if field == "prompt" else '"prompt": "a"'
    small = min(place, 3)
    few = ["300"] * 4
    few[small] = wrong
    message, param = refusal(
        CompletionRequest, f'{{{rest}, "{field}": [{",".join(few)}]}}'.encode()
    )
    large = refusal(CompletionRequest, f'{{{rest}, "{field}": [{",".join(ids)}]}}'.encode())
    assert param is not None
    named = param.replace(f"[{small}]", f"[{place}]")
    assert large == (message.replace(param, named), named)


@pytest.mark.parametrize("field", ["prompt", "max_tokens", "stop", "stop_token_ids", "logit_bias"])
@pytest.mark.parametrize(
    "text",
    [IDS, LISTS, f"[{LISTS}]", f"[{IDS}]", "[" + "[1]," * 30_000 + "[]]", "[[" + "0," * 40_000],
)
def test_parsing_method_does_not_change_the_result(
    monkeypatch: pytest.MonkeyPatch, field: str, text: str
) -> None:
    rest = "" if field == "prompt" else '"prompt": "a", '
    body = f'{{{rest}"{field}": {text}}}'.encode()

    def outcome() -> Any:
        try:
            return asyncio.run(read_body(CompletionRequest, body)).model_dump()
        except ApiError as error:
            return str(error), error.param

    in_parts = outcome()
    monkeypatch.setattr(bodies, "LARGE", 1 << 30)
    assert in_parts == outcome()


def test_list_of_only_whitespace_is_empty() -> None:
    blank = f'{{"prompt": [{" " * 70_000}]}}'.encode()
    assert refusal(CompletionRequest, blank) == refusal(CompletionRequest, b'{"prompt": []}')


@pytest.mark.parametrize(
    ("model", "field", "rest"),
    [
        (ResponsesRequest, "input", {}),
        (MessagesRequest, "messages", {"model": "m", "max_tokens": 1}),
    ],
)
def test_error_quotes_only_start_of_long_type(
    model: type[RequestBody], field: str, rest: dict[str, Any]
) -> None:
    long = {"type": "t" * 10_000}
    given = [long] if field == "input" else [{"role": "user", "content": [long]}]
    message, _ = refusal(model, json.dumps({**rest, field: given}).encode())
    assert "t" * 100 in message
    assert "t" * 101 not in message


def test_text_is_not_scanned_by_character_for_images() -> None:
    class Text(str):
        def __iter__(self) -> Any:
            raise AssertionError("three million letters take a quarter of a second")

    assert content_of(Text("read me")) == "read me"
