"""Writes docs/settings.md from the definitions of all settings."""

from pathlib import Path

from engine.shared.config import Section
from engine.shared.settings import sections_of, settings_of
from server.config import ServeConfig
from server.flags import title

TARGET = Path(__file__).parent.parent / "docs" / "settings.md"

HEADER = """# Settings

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


def render() -> str:
    """Return the whole page."""
    return f"{HEADER}{table(ServeConfig)}"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
