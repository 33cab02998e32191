"""Every number that a client may send has a smallest and a largest value."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from server.access.limits import MAX_CHOICES
from server.api.admin.schema import ScaleRequest, UtilityRequest
from server.api.chat.schema import ChatCompletionRequest
from server.api.completions.schema import CompletionRequest
from server.api.responses.schema import ResponsesRequest
from server.api.tokenize.schema import DetokenizeRequest, TokenizeRequest

BODIES: list[type[BaseModel]] = [
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    ScaleRequest,
    TokenizeRequest,
    UtilityRequest,
]


def numbers(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every number of a JSON schema with its place."""
    if isinstance(schema, dict):
        if schema.get("type") in ("integer", "number"):
            yield path, schema
        for key, value in schema.items():
            yield from numbers(value, f"{path}/{key}")
    elif isinstance(schema, list):
        for index, value in enumerate(schema):
            yield from numbers(value, f"{path}/{index}")


@pytest.mark.parametrize("body", BODIES)
def test_no_number_of_a_request_is_without_bounds(body: type[BaseModel]) -> None:
    open_ended = [
        place
        for place, number in numbers(body.model_json_schema(), body.__name__)
        if not {"minimum", "exclusiveMinimum"} & number.keys()
        or not {"maximum", "exclusiveMaximum"} & number.keys()
    ]
    assert open_ended == []


@pytest.mark.parametrize("best_of", [MAX_CHOICES + 1, 10**15, 2**62, 10**30])
def test_a_best_of_beyond_all_bounds_leaves_the_queue_as_it_was(http: Any, best_of: int) -> None:
    body = {"model": "tiny", "prompt": "hello", "best_of": best_of}
    response = http.post("/v1/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "best_of"
    assert http.post("/v1/completions", {"prompt": "hello"}).status_code == 200
