"""Known properties of models, and their authors' sampling defaults."""

import json
import logging
import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

logger = logging.getLogger(__name__)

_FILE = Path(__file__).parents[1] / "presets.toml"


class Preset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One preset, or several merged; None for unknown properties."""

    family: tuple[str, ...] = ()
    name: str = ""
    gguf: bool = False
    sampling: dict[str, Any] | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None

    def fits(self, family: str, name: str, *, gguf: bool) -> bool:
        """Return whether the preset applies to a model."""
        if self.family and family not in self.family:
            return False
        return self.name in name.lower() and (gguf or not self.gguf)


def presets() -> list[Preset]:
    """Return all presets."""
    return msgspec.convert(tomllib.loads(_FILE.read_text("utf-8"))["presets"], list[Preset])


def preset_of(family: str, name: str, *, gguf: bool = False) -> Preset:
    """Return the merged presets of a model.

    Args:
        family: the `model_type` of its configuration.
    """
    found: dict[str, Any] = {}
    for each in presets():
        if each.fits(family, name, gguf=gguf):
            for key in ("sampling", "tool_call_parser", "reasoning_parser"):
                if found.get(key) is None:
                    found[key] = getattr(each, key)
    return Preset(**found)


NEUTRAL = ("vllm", "none")
"""Values of the setting that ignore the model's recommendation."""


class BadGenerationConfig(ValueError):
    """The generation config is missing or invalid."""


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults for request parameters; fields are named as in generation_config.json."""

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_k: int = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0
    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Default of the maximum tokens to generate."""


def read_sampling_defaults(
    model: Path, source: str, overrides: str = "{}", known: dict[str, Any] | None = None
) -> SamplingDefaults:
    """Return the defaults according to `--generation-config` and `--override-generation-config`.

    Args:
        model: the served model's directory.
        source: "auto" reads generation_config.json from it, if there is one; "vllm" or "none"
            uses no recommendation; anything else is the directory to read the file from.
        overrides: JSON object of parameters that take precedence.
        known: recommendation for the model if "auto" finds no file.

    Raises:
        BadGenerationConfig: the directory or file does not exist or is invalid.
    """
    flag = "--override-generation-config"
    try:
        overridden = json.loads(overrides)
        unknown = set(overridden.keys()) - set(SamplingDefaults.__struct_fields__)
    except (ValueError, AttributeError) as error:
        raise BadGenerationConfig(f"{flag} is not a JSON object: {error}") from error
    if unknown:
        raise BadGenerationConfig(f"{flag}: {min(unknown)!r} is not a sampling parameter")
    found = _recommended(model, source)
    if source == "auto" and known and not found.keys() & known.keys():
        logger.info("sampling: %s (from the presets, presets.toml)", json.dumps(known))
        found |= known
    return _defaults(found | overridden, flag)


def _recommended(model: Path, source: str) -> dict[str, Any]:
    """Return the parameters in the model's file, or in the specified one."""
    if source in NEUTRAL:
        return {}
    path = (model if source == "auto" else Path(source).expanduser()) / "generation_config.json"
    if not path.is_file():
        if source == "auto":
            return {}
        raise BadGenerationConfig(f"--generation-config: there is no {path}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        found = {name: value for name, value in values.items() if value is not None}
    except (OSError, ValueError, AttributeError) as error:
        raise BadGenerationConfig(f"{path} cannot be used: {error}") from error
    _defaults(found, str(path))
    return found


def _defaults(values: dict[str, Any], source: str) -> SamplingDefaults:
    try:
        return msgspec.convert(values, SamplingDefaults)
    except ValueError as error:
        raise BadGenerationConfig(f"{source} cannot be used: {error}") from error
