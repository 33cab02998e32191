"""The endpoints with a request body, read from the app rather than listed by hand."""

from collections.abc import Iterator
from typing import Any, get_args

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel

ADMIN_KEY = "of an administrator"
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


def bodies(app: FastAPI) -> dict[str, tuple[type[BaseModel], ...]]:
    """Return the body models of each path of an app."""
    found = {}
    for route in app.routes:
        if isinstance(route, APIRoute) and route.body_field is not None:
            body = route.body_field.field_info.annotation
            kinds = [each for each in get_args(body) or (body,) if isinstance(each, type)]
            of_json = tuple(each for each in kinds if issubclass(each, BaseModel))
            if of_json:
                found[route.path] = of_json
    return found


def models(app: FastAPI) -> dict[str, type[BaseModel]]:
    """Return all body models by name."""
    return {model.__name__: model for each in bodies(app).values() for model in each}


def numbers(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every number of a JSON schema with its path."""
    if isinstance(schema, dict):
        if schema.get("type") in ("integer", "number"):
            yield path, schema
        for key, value in schema.items():
            yield from numbers(value, f"{path}/{key}")
    elif isinstance(schema, list):
        for index, value in enumerate(schema):
            yield from numbers(value, f"{path}/{index}")
