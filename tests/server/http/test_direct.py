"""Endpoints that generate are reached without the router, and by nothing but POST."""

from typing import Any

from fastapi import FastAPI

from server.config import FrontEndConfig, GuardConfig


def test_what_generates_goes_past_the_router(app: FastAPI, http: Any) -> None:
    assert http.get("/health").status_code == 200
    app.router.routes.clear()
    assert http.get("/health").status_code == 404
    assert http.complete()["choices"][0]["text"]


def test_other_methods_of_its_path_are_the_routers(http: Any) -> None:
    answer = http.get("/v1/completions")
    assert answer.status_code == 405
    assert answer.json()["error"]["code"] == "method_not_allowed"


def test_guards_are_before_the_way_past_it(http_of: Any) -> None:
    config = FrontEndConfig(guards=GuardConfig(api_key=("secret",)))
    assert http_of(config).post("/v1/completions", {"prompt": "x"}).status_code == 401
