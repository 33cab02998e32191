"""The server uses only public names of uvicorn, in any installed version."""

import ast
import inspect
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tests.support.syntax import tree_of

FOLDER = Path(__file__).parents[3] / "server" / "http"
BUILT_ON = (HttpToolsProtocol, RequestResponseCycle, uvicorn.Server, uvicorn.Config)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names_of_uvicorn() -> set[str]:
    """Return the private names of its classes and their instances."""
    found = set[str]()
    for kind in BUILT_ON:
        found.update(dir(kind))
        for node in ast.walk(ast.parse(inspect.getsource(kind))):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
    return {name for name in found if is_private(name)}


def test_no_private_name_of_uvicorn_is_used_or_hidden() -> None:
    theirs = private_names_of_uvicorn()
    assert "_start_asgi_task" in theirs
    for path in FOLDER.glob("*.py"):
        used = set[str]()
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                used.add(node.name)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("uvicorn"):
                parts = [*(node.module or "").split("."), *(each.name for each in node.names)]
                assert not [part for part in parts if is_private(part)], path
        assert not used & theirs, path
