import json

import pytest

from server.clients.batch_lines import BadLine, read_request, read_result

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def test_a_request_keeps_its_body_as_it_is() -> None:
    request = read_request(b'{"custom_id":"a","url":"/v1/responses","body": {"input" :"\\u00e9"}}')
    assert (request.custom_id, request.url) == ("a", "/v1/responses")
    assert bytes(request.body) == b'{"input" :"\\u00e9"}'


@pytest.mark.parametrize(
    ("changes", "code", "name"),
    [
        ({"method": "GET"}, "invalid_method", "a"),
        ({"url": "/v1/images"}, "invalid_url", "a"),
        ({"body": [1]}, "invalid_request", "a"),
        ({"body": {"stream": True}}, "invalid_request", "a"),
        ({"custom_id": 5}, "invalid_request", None),
        ({"url": None}, "invalid_request", "a"),
    ],
)
def test_unsendable_requests_are_explained(
    changes: dict[str, object], code: str, name: str | None
) -> None:
    with pytest.raises(BadLine) as caught:
        read_request(json.dumps({**GOOD, **changes}).encode())
    assert (caught.value.error.code, caught.value.custom_id) == (code, name)


@pytest.mark.parametrize("line", [b"not json", b"{", b"\xff"])
def test_non_json_line_is_reported(line: bytes) -> None:
    with pytest.raises(BadLine) as caught:
        read_request(line)
    assert caught.value.error.code == "invalid_json_line"


@pytest.mark.parametrize(
    ("response", "outcome"),
    [
        ({"status_code": 200, "request_id": "r", "body": {}}, "answered"),
        ({"status_code": 400, "request_id": "r", "body": {}}, "refused"),
        ({"status_code": 429, "request_id": "r", "body": {}}, "failed"),
        ({"status_code": 503, "request_id": "r", "body": "x"}, "failed"),
        (None, "failed"),
    ],
)
def test_retryable_responses_count_as_failed(response: object, outcome: str) -> None:
    line = {"id": "i", "custom_id": "a", "response": response, "error": None}
    result = read_result(json.dumps(line).encode() + b"\n")
    assert result is not None
    assert result.outcome == outcome


def test_a_damaged_line_is_no_result() -> None:
    assert read_result(b'{"id": "i", "custom_id": "a"}') is None, "the line's end is missing"
    assert read_result(b'{"id": "i", "cust\n') is None
