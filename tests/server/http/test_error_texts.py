"""Error messages state the problem and what to do next."""

from typing import Any

import pytest

from server.http.errors import no_such_path
from server.limits import MAX_ERROR_LENGTH

HI = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/chat/completions", "Did you mean /v1/chat/completions?"),
        ("/v1/v1/chat/completions", "Did you mean /v1/chat/completions?"),
        ("/v1/chat/completion", "Did you mean /v1/chat/completions?"),
        ("/v1/embedding/", "Did you mean /v1/embeddings?"),
        ("/models", "Did you mean /v1/models?"),
        ("/v1/audio/transcriptions", "Speech and transcription: not served here."),
        ("/v1/images/generations", "Images: not served here."),
        ("/v1/files", "Files: not served here."),
        ("/v1/assistants", "not served here"),
        ("/api/chat", "Ollama's API (use /v1/chat/completions): not served here."),
        ("/something/else/entirely", "Not Found. /docs lists the paths."),
        ("/" + "v1/chat/completions" * 20, "/docs lists the paths."),
    ],
)
def test_unknown_path_suggests_a_similar_one(http: Any, path: str, said: str) -> None:
    for answer in (http.get(path), http.post(path, {})):
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["code"] == "not_found"
        assert said in error["message"]


def test_only_full_path_segments_identify_other_apis() -> None:
    assert "not served" not in no_such_path("/apiary", ["/v1/models"])


def test_unknown_model_error_lists_served_models(http: Any) -> None:
    for answer in (
        http.post("/v1/chat/completions", {"model": "gpt-4o", **HI}),
        http.get("/v1/models/gpt-4o"),
        http.post("/v1/messages", {"model": "gpt-4o", "max_tokens": 1, **HI}),
    ):
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["message"] == "The model 'gpt-4o' is not served here. Served: also-tiny, tiny."
        assert error.get("code", "model_not_found") == "model_not_found"
        assert error.get("param", "model") == "model"


def test_an_error_that_quotes_a_long_text_loses_its_middle(http: Any) -> None:
    answer = http.post("/v1/chat/completions", {"model": "m" * 10_000, **HI})
    message = answer.json()["error"]["message"]
    assert len(message) <= MAX_ERROR_LENGTH
    assert message.startswith("The model 'mmm")
    assert message.endswith("mmm' is not served here. Served: also-tiny, tiny.")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reasoning_effort": "huge"}, "reasoning_effort: must be 'none', 'minimal', 'low', "
         "'medium', 'high', 'xhigh' or 'max'"),
        ({"temperature": 3}, "temperature: must be at most 2"),
        ({"temperature": "1"}, "temperature: must be a number"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1"),
        ({"max_tokens": 1.5}, "max_tokens: must be an integer"),
        ({"stream": "yes"}, "stream: must be true or false"),
        ({"messages": "hi"}, "messages: must be an array"),
        ({"messages": []}, "messages: must not be empty"),
        ({"messages": [{"content": "x"}]}, "messages[0].role: is required"),
    ],
)  # fmt: skip
def test_error_of_invalid_value_states_allowed_values(
    http: Any, fields: dict[str, Any], message: str
) -> None:
    answer = http.post("/v1/chat/completions", {"model": "tiny", **HI, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == message


def test_batches_of_messages_are_named_like_other_apis(http: Any) -> None:
    error = http.get("/v1/messages/batches").json()["error"]
    assert error["type"] == "not_found_error"
    assert "not served here" in error["message"]
