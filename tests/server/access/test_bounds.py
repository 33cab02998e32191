"""Every number that a client may send has a smallest and a largest value."""

from typing import Any

import pytest
from fastapi import FastAPI

from server.limits import MAX_CHOICES
from tests.server.endpoints import models, numbers


def test_no_number_of_a_request_is_without_bounds(whole_app: FastAPI) -> None:
    found = models(whole_app)
    assert {"CompletionRequest", "EmbeddingsRequest", "LoadLoraRequest", "ItemsRequest"} <= set(
        found
    )
    open_ended = [
        place
        for name, model in found.items()
        for place, number in numbers(model.model_json_schema(), name)
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
