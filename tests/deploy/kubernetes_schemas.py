"""Kubernetes schemas by version, read once and shared by all validations."""

import json
from functools import cache
from importlib.resources import files
from typing import Any


def validate(manifest: dict[str, Any], version: str) -> None:
    """Validate an object and all its field names against a Kubernetes version, such as 1.30.

    Raises:
        jsonschema.ValidationError: the object is invalid.
    """
    group, _, of_group = manifest["apiVersion"].rpartition("/")
    parts = (manifest["kind"].lower(), group.partition(".")[0], of_group)
    _validator("-".join(filter(None, parts)), version).validate(manifest)


@cache
def _validator(name: str, version: str) -> Any:
    from jsonschema import Draft202012Validator
    from referencing import Resource

    schema = _read(version, name)
    own = Resource.from_contents(schema)
    return Draft202012Validator(schema, registry=(own @ _definitions(version)).crawl())


@cache
def _definitions(version: str) -> Any:
    from referencing import Registry, Resource

    return (Resource.from_contents(_read(version, "_definitions")) @ Registry()).crawl()


def _read(version: str, name: str) -> Any:
    # Of the package the files alone: its function reads a megabyte of them for every object.
    schemas = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict"
    return json.loads((schemas / f"{name}.json").read_text(encoding="utf-8"))
