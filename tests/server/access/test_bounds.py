"""Every number in a request has a minimum and a maximum."""

from fastapi import FastAPI

from tests.server.endpoints import models, numbers


def test_every_number_in_requests_has_bounds(whole_app: FastAPI) -> None:
    found = models(whole_app)
    assert {"CompletionRequest", "EmbeddingsRequest", "LoadLoraRequest", "ItemsRequest"} <= set(
        found
    )
    open_ended = [
        slot
        for name, model in found.items()
        for slot, number in numbers(model.model_json_schema(), name)
        if not {"minimum", "exclusiveMinimum"} & number.keys()
        or not {"maximum", "exclusiveMaximum"} & number.keys()
    ]
    assert open_ended == []
