"""What is known of a model beyond what its files say: `server/presets.yaml`."""

from pathlib import Path
from typing import Any

import msgspec
import yaml

_FILE = Path(__file__).parents[1] / "presets.yaml"


class Preset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry, or what several say together; None where nothing is known."""

    family: tuple[str, ...] = ()
    name: str = ""
    gguf: bool = False
    sampling: dict[str, Any] | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None

    def fits(self, family: str, name: str, *, gguf: bool) -> bool:
        """Whether the entry is about such a model."""
        if self.family and family not in self.family:
            return False
        return self.name in name.lower() and (gguf or not self.gguf)


def presets() -> list[Preset]:
    """Return all entries."""
    return msgspec.convert(yaml.safe_load(_FILE.read_text(encoding="utf-8")), list[Preset])


def preset_of(family: str, name: str, *, gguf: bool = False) -> Preset:
    """Return what is known of a model.

    Args:
        family: the `model_type` of its configuration.
        name: what it is called, in full.
        gguf: whether it is a GGUF file.
    """
    found: dict[str, Any] = {}
    for each in presets():
        if each.fits(family, name, gguf=gguf):
            for key in ("sampling", "tool_call_parser", "reasoning_parser"):
                if found.get(key) is None:
                    found[key] = getattr(each, key)
    return Preset(**found)
