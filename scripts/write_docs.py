"""Writes the pages and files that are derived from the code (`make docs`)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import yaml
from fastapi.routing import APIRoute
from pydantic import BaseModel

from engine.shared.config import Section
from engine.shared.group_config import AGREED_IN_LOCKSTEP, AGREED_SETTINGS
from engine.shared.settings import sections_of, settings_of
from server.api.compatibility import rows_of
from server.api.responses import stored
from server.app import ROUTERS
from server.config import ServeConfig
from server.flags import title

ROOT = Path(__file__).parent.parent

# -- docs/settings.md ------------------------------------------------------------------------------

SETTINGS_HEADER = """# Settings

Every setting is a flag, an environment variable and a key of the YAML file that `--config` names
(the flag's name without the dashes in front). A flag wins over a variable, a variable over the
file, the file over the default. Whole numbers may have a unit: `4GiB`, `4Gi` and `32K` count in
powers of 1024, `4GB` and `32k` in powers of 1000. `swell serve --help-all` lists the same. `make
docs` writes this page from the definitions in `engine/shared/config`, `server/config` and
`coordinator/config.py`.

    swell serve --config serve.yaml

```yaml
# serve.yaml
model: Qwen/Qwen3-0.6B
served-model-name: [qwen, default]
data-parallel-size: 4
max-model-len: 16K
kv-cache-memory-bytes: 8GiB
host: "*"
port: 8080
api-key-file: /run/secrets/swell-keys
override-generation-config: {temperature: 0.6, top_p: 0.95}
log-format: json
```

"""


def table(config_type: type[Section]) -> str:
    """Return a heading and a table of settings for each section of a config type."""
    lines = []
    sections = sections_of(config_type)
    section = None
    for setting in settings_of(config_type):
        if setting.section != section:
            section = setting.section
            lines += ["", f"## {title(sections[section])}", ""]
            lines += ["| flag | variable | default | what |", "|---|---|---|---|"]
        absent = setting.default in (None, ()) or setting.name == "model"
        default = "" if absent else setting.default
        text = setting.help.replace("|", r"\|")
        lines.append(f"| `{setting.flag}` | `{setting.variable}` | {default} | {text} |")
    return "\n".join(lines[1:]) + "\n"


def settings_page() -> str:
    """Return the page of all settings."""
    return f"{SETTINGS_HEADER}{table(ServeConfig)}"


# -- docs/compatibility.md -------------------------------------------------------------------------

_COMPATIBILITY_HEADER = """# Compatibility

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


def compatibility_page() -> str:
    """Return the page of all fields of request bodies."""
    return _COMPATIBILITY_HEADER + "".join([_section(*each) for each in documented().items()])


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


# -- the files -------------------------------------------------------------------------------------


def agreed_settings() -> str:
    """Return the chart's list of settings that must be equal on all engines."""
    names = {"always": list(AGREED_SETTINGS), "lockstep": list(AGREED_IN_LOCKSTEP)}
    return f"# Written by `make docs` from engine/shared/group_config.py.\n{yaml.safe_dump(names)}"


GENERATED: dict[Path, Callable[[], str]] = {
    ROOT / "docs" / "settings.md": settings_page,
    ROOT / "docs" / "compatibility.md": compatibility_page,
    ROOT / "helm" / "swell" / "files" / "agreed-settings.yaml": agreed_settings,
}
"""Paths, and what returns their content."""

if __name__ == "__main__":
    for path, render in GENERATED.items():
        path.write_text(render(), encoding="utf-8")
