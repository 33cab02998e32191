"""Request ids, trailing slashes and path prefixes."""

from typing import Any

import pytest

from engine.shared.config import ModelConfig
from server.config import FrontEndConfig, GuardConfig, HttpConfig
from server.http.middleware import plain_path


@pytest.mark.parametrize(
    ("path", "root", "plain"),
    [
        ("/", "", "/"),
        ("", "", "/"),
        ("//", "", "/"),
        ("/v1/models/", "", "/v1/models"),
        ("/v1/models", "/swell", "/v1/models"),
        ("/swell/v1/models/", "/swell", "/v1/models"),
        ("/swell", "/swell", "/"),
        ("/swell/", "/swell", "/"),
        ("/swellish/v1", "/swell", "/swellish/v1"),
        ("/swell/swell/admin/scale", "/swell", "/admin/scale"),
    ],
)
def test_paths_are_normalized(path: str, root: str, plain: str) -> None:
    assert plain_path(path, root) == plain


def locked(http_of: Any, root: str = "") -> Any:
    guards = GuardConfig(api_key=("secret",), admin_key="root-secret")
    http = HttpConfig(root_path=root)
    return http_of(FrontEndConfig(model=ModelConfig(model="tiny"), http=http, guards=guards))


@pytest.mark.parametrize("path", ["/nowhere", "/health", "/v1/completions", "/admin/x", "/metrics"])
@pytest.mark.parametrize("name", [None, "mine", "with space", "x" * 300])
def test_every_answer_has_a_request_id(http_of: Any, path: str, name: str | None) -> None:
    headers = {} if name is None else {"X-Request-Id": name}
    for http in (locked(http_of), http_of(FrontEndConfig(model=ModelConfig(model="tiny")))):
        for method in ("GET", "POST"):
            found = http.request(method, path, headers=headers).headers.get_list("x-request-id")
            assert len(found) == 1
            assert (found[0] == name) == (name == "mine")
            assert " " not in found[0]
            assert 0 < len(found[0]) <= 256


def test_unexpected_errors_have_a_request_id(http: Any, engines: Any) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    engines.script = broken
    answer = http.post("/v1/completions", {"prompt": "x"}, headers={"X-Request-Id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")


@pytest.mark.parametrize("root", ["", "/swell", "/swell/"])
@pytest.mark.parametrize("before", ["", "/swell", "/swell/swell"])
@pytest.mark.parametrize("behind", ["", "/", "//"])
def test_no_spelling_of_a_path_bypasses_the_guards(
    http_of: Any, root: str, before: str, behind: str
) -> None:
    http = locked(http_of, root)
    for path in ("/admin/engines", "/v1/models", "/metrics", "/openapi.json"):
        answer = http.get(before + path + behind)
        assert answer.status_code in (401, 403, 404), path
        wrong = http.get(before + path + behind, headers={"Authorization": "Bearer wrong"})
        assert wrong.status_code in (401, 403, 404), path
    key = {"Authorization": "Bearer secret"}
    assert http.get(before + "/admin/engines" + behind, headers=key).status_code in (403, 404)
    known = http.get(before + "/v1/models" + behind, headers=key)
    assert known.status_code == (200 if root or not before else 404)


def test_trailing_slash_is_ignored(http: Any) -> None:
    assert http.post("/v1/completions/", {"prompt": "x"}).status_code == 200
    assert http.get("/v1/models/").json() == http.get("/v1/models").json()
