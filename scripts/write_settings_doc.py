"""Writes docs/settings.md from the definitions of all settings."""

from pathlib import Path

from engine.shared.config import HealthConfig, Section
from engine.shared.settings import markdown_table
from server.config import ServeConfig

TARGET = Path(__file__).parent.parent / "docs" / "settings.md"

HEADER = """# Settings

Every setting is a flag, an environment variable and a key of the YAML file that `--config` names
(the flag's name without the dashes in front). A flag wins over a variable, a variable over the
file, the file over the default. `swell serve --help` lists the same; the section Health is for
`swell engine` and `swell coordinator`. `make docs` writes this page from the definitions in
`engine/shared/config`, `server/config` and `coordinator/config.py`.

"""


class Containers(Section, frozen=True, kw_only=True):
    """What only `swell engine` and `swell coordinator` have."""

    health: HealthConfig = HealthConfig()


def render() -> str:
    """Return the whole page."""
    return f"{HEADER}{markdown_table(ServeConfig)}\n{markdown_table(Containers)}"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
