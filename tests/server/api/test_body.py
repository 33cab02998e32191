"""Bodies are read at a price that does not grow with what is missing in them."""

import asyncio

import pydantic
import pydantic_core
import pytest

from server.api.body import read_body
from server.api.completions.schema import CompletionRequest
from server.api.messages.schema import CountTokensRequest, MessagesRequest
from server.api.tokenize.schema import DetokenizeRequest
from server.errors import ApiError


def refusal(model: type[pydantic.BaseModel], body: bytes) -> tuple[str, str | None]:
    with pytest.raises(ApiError) as raised:
        asyncio.run(read_body(model, body))
    return str(raised.value), raised.value.param


@pytest.mark.parametrize(
    "model", [CompletionRequest, MessagesRequest, CountTokensRequest, DetokenizeRequest]
)
@pytest.mark.parametrize("given", ['"other": 1', '"messages": []', '"model": "m"'])
def test_a_large_body_without_a_field_is_refused_as_a_small_one(
    model: type[pydantic.BaseModel], given: str
) -> None:
    large = "[" + "300," * 20_000 + "300]"
    small, padded = f"{{{given}}}", f'{{{given}, "unknown": {large}}}'
    assert refusal(model, padded.encode()) == refusal(model, small.encode())


def test_a_large_body_with_all_required_fields_is_read() -> None:
    large = "[" + "300," * 20_000 + "300]"
    body = asyncio.run(read_body(CompletionRequest, f'{{"prompt": {large}}}'.encode()))
    assert body.prompt == [300] * 20_001


def test_of_a_large_body_that_is_no_object_pydantic_says_what_is_wrong() -> None:
    wrong = ("[" + "300," * 20_000 + "300]").encode()
    message, param = refusal(CompletionRequest, wrong)
    assert param is None
    assert "object" in message


@pytest.mark.parametrize("piece", [b"0,", b'",",', b"[],", rb'"\\\"[",'])
def test_others_have_their_turn_while_a_large_body_is_priced(piece: bytes) -> None:
    body = b'{"prompt":[' + piece * 30_000 + b"0]}"

    async def turns() -> int:
        reading = asyncio.create_task(read_body(CompletionRequest, body))
        count = 0
        while not reading.done():
            await asyncio.sleep(0)
            count += 1
        await asyncio.wait([reading])
        assert reading.exception() is None or isinstance(reading.exception(), ApiError)
        return count

    assert asyncio.run(turns()) > len(body) // 2**15


def test_a_large_body_is_not_parsed_once_more_to_say_what_is_wrong_with_it(
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


def test_what_is_wrong_is_named_beside_numbers_that_are_no_json() -> None:
    body = b'{"prompt": [1, 2, -1], "temperature": 1e999, "other": [NaN]}'
    assert refusal(CompletionRequest, body)[1] in ("prompt[2]", "temperature")
