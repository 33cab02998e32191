"""Writes docs/compatibility.md from the table of request fields."""

from pathlib import Path

import msgspec

from server.api.compatibility import OTHER_PATHS, TABLE, Rows

TARGET = Path(__file__).parent.parent / "docs" / "compatibility.md"

HEADER = """# Compatibility

Written by `make docs` from `server/api/compatibility.py`, which a test holds against the
running application (`tests/server/api/test_compatibility.py`). Fields are those of OpenAI's
reference and of vLLM's servers.

- **same**: as there.
- **different**: served, with the difference named.
- **refused**: 400 with the field's name in `param`. Null and what stands behind "but" ask for
  nothing and are taken.
- **ignored**: taken, and changes nothing. No field is ignored that would change the answer.

Fields that are nowhere on this page are ignored, as OpenAI clients expect of a server that is older
than they are. Where texts are written, fields of other endpoints are refused unless they have the
value that they have anyway or are empty. `/invocations` takes the bodies of the endpoint whose
fields a request has.
"""


def render() -> str:
    """Return the whole page."""
    return HEADER + "".join(_section(path, rows) for path, rows in TABLE.items())


def _section(path: str, rows: Rows) -> str:
    same = ", ".join(f"`{name}`" for name, row in sorted(rows.items()) if row.state == "same")
    paths = ", ".join([path, *OTHER_PATHS.get(path, ())])
    text = f"\n## {paths}\n\nSame: {same}.\n"
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
