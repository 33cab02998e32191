"""Writes the chart's list of settings that must be equal on all engines."""

from pathlib import Path

import yaml

from engine.shared.group_config import AGREED_IN_LOCKSTEP, AGREED_SETTINGS

TARGET = Path(__file__).parent.parent / "helm" / "swell" / "files" / "agreed-settings.yaml"


def render() -> str:
    """Return the whole file."""
    names = {"always": list(AGREED_SETTINGS), "lockstep": list(AGREED_IN_LOCKSTEP)}
    return f"# Written by `make docs` from engine/shared/group_config.py.\n{yaml.safe_dump(names)}"


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
