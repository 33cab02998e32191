"""Writes docs/compatibility.md from the request bodies of all path operations."""

from pathlib import Path
from typing import Any

import msgspec
from fastapi.routing import APIRoute
from pydantic import BaseModel

from server.api.compatibility import rows_of
from server.api.responses import stored
from server.app import ROUTERS

TARGET = Path(__file__).parent.parent / "docs" / "compatibility.md"

HEADER = """# Compatibility

Written by `make docs` from the schemas of bodies (`server/schema/support.py`), which a test holds
against the running application (`tests/server/api/test_compatibility.py`). Fields are those of
OpenAI's reference and of vLLM's servers.

- **same**: as there.
- **different**: served, with the difference named.
- **refused**: 400 with the field's name in `param`. Null and what stands behind "but" ask for
  nothing and are taken.
- **ignored**: taken, and changes nothing. No field is ignored that would change the answer.

Fields that are nowhere on this page are ignored, as OpenAI clients expect of a server that is older
than they are; each name is logged once. Where texts are written, fields of other endpoints are
refused unless they have the value that they have anyway or are empty. `/invocations` takes the
bodies of the endpoint whose fields a request has.
"""


def documented() -> dict[type[BaseModel], list[str]]:
    """Return the paths by body type; paths that accept several body types are left out."""
    found: dict[type[BaseModel], list[str]] = {}
    for router in (*ROUTERS, stored.router):
        for route in router.routes:
            field = route.body_field if isinstance(route, APIRoute) else None
            body: Any = None if field is None else field.field_info.annotation
            if isinstance(route, APIRoute) and isinstance(body, type):
                found.setdefault(body, []).append(route.path)
    return found


def render() -> str:
    """Return the whole page."""
    return HEADER + "".join([_section(*each) for each in documented().items()])


def _section(body: type[BaseModel], paths: list[str]) -> str:
    rows = rows_of(body)
    same = ", ".join(f"`{name}`" for name, row in sorted(rows.items()) if row.state == "same")
    text = f"\n## {', '.join(paths)}\n\nSame: {same}.\n"
    if any(row.state != "same" for row in rows.values()):
        text += "\n| Field | State | Why |\n|---|---|---|\n"
    for state in ("different", "refused", "ignored"):
        for name, row in sorted(rows.items()):
            if row.state == state and not row.foreign:
                taken = " or ".join(f"`{_json(value)}`" for value in row.neutral)
                but = f"; but {taken}" if taken else ""
                text += f"| `{name}` | {state} | {row.why}{but} |\n"
    foreign = ", ".join(f"`{name}`" for name, row in sorted(rows.items()) if row.foreign)
    return text + (f"\nRefused as fields of other endpoints: {foreign}.\n" if foreign else "")


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
