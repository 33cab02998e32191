"""Loads a config's settings from flags, environment variables and a YAML file.

A config is a Struct whose fields are sections (`engine.shared.config.Section`); the fields of
sections are settings. For a setting `max_num_seqs` the flag is `--max-num-seqs`, the variable
`SWELL_MAX_NUM_SEQS` and the YAML key `max-num-seqs` (or `max_num_seqs`). A flag takes precedence
over a variable, a variable over the file, the file over the default.
"""

import json
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union

import msgspec

from engine.shared.config import OneOf, Section

ENV_PREFIX = "SWELL_"

C = TypeVar("C", bound=Section)


class SettingsError(ValueError):
    """A setting has an invalid value; the message names it and its origin."""


class Setting(NamedTuple):
    """One setting of a section."""

    section: str
    name: str
    type: Any
    default: Any
    help: str
    open: OneOf | None = None
    """Its words and plugin group, if plugins can add values."""

    @property
    def flag(self) -> str:
        return "--" + self.key

    @property
    def key(self) -> str:
        """The YAML key."""
        return self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def is_bool(self) -> bool:
        return self.type is bool

    @property
    def is_list(self) -> bool:
        return typing.get_origin(self.type) is tuple

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed words, besides plugin names; empty: any text."""
        if self.open is not None:
            return self.open.words
        return typing.get_args(self.type) if typing.get_origin(self.type) is Literal else ()


def sections_of(config_type: type[Section]) -> dict[str, type[Section]]:
    """Return the sections of a config type by field name."""
    hints = typing.get_type_hints(config_type)
    return {name: hints[name] for name in config_type.__struct_fields__}


def settings_of(config_type: type[Section]) -> Iterator[Setting]:
    """Yield every setting of a config type, in definition order."""
    for section, section_type in sections_of(config_type).items():
        annotated = typing.get_type_hints(section_type, include_extras=True)
        for field in msgspec.structs.fields(section_type):
            metadata = annotated[field.name].__metadata__
            [text] = [m for m in metadata if isinstance(m, str)]
            words = next((m for m in metadata if isinstance(m, OneOf)), None)
            yield Setting(section, field.name, _plain(field.type), field.default, text, words)


def changes_of(config: Section) -> Iterator[tuple[Setting, Any]]:
    """Yield every setting that differs from its default, with its value, in definition order."""
    for setting in settings_of(type(config)):
        value = getattr(getattr(config, setting.section), setting.name)
        if value != setting.default:
            yield setting, value


def _plain(annotation: Any) -> Any:
    """Strip bounds and an optional None from an annotation."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _plain(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return _plain(next(a for a in typing.get_args(annotation) if a is not types.NoneType))
    return annotation


def suggestion(word: str, known: Iterable[str], *, at_least: float = 0.75) -> str:
    """Return ": did you mean X?" with the known word most similar to this one, "" if none is.

    Args:
        word: the given word.
        known: valid words.
        at_least: minimum similarity ratio (0 to 1).
    """
    import difflib  # takes milliseconds to import and is needed for mistakes only

    alike = difflib.get_close_matches(word, list(known), 1, at_least)
    return f": did you mean {alike[0]}?" if alike else ""


def misspelt_variables(environment: Iterable[str], settings: Iterable[Setting]) -> Iterator[str]:
    """Yield a warning for each environment variable that looks like a misspelt setting."""
    known = {setting.variable for setting in settings}
    for name in environment:
        if name.startswith(ENV_PREFIX) and name not in known:
            # Kubernetes adds variables such as SWELL_SERVICE_HOST, which are not settings.
            meant = suggestion(name, known, at_least=0.9)
            if meant:
                yield f"the variable {name} is no setting{meant}"


def load(
    config_type: type[C],
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    config_file: Path | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> C:
    """Build a config from flags, environment and YAML file, and check every value.

    Args:
        defaults: machine-specific defaults by setting name; they take precedence over a field's.

    Raises:
        SettingsError: an unknown key, or a value of the wrong type or out of bounds.
    """
    from_file = _read_yaml(config_file, config_type) if config_file else {}
    values: dict[str, dict[str, Any]] = {name: {} for name in sections_of(config_type)}
    origins: dict[str, str] = {}
    for setting in settings_of(config_type):
        if flags.get(setting.name) is not None:
            value, origin = flags[setting.name], setting.flag
        elif environment.get(setting.variable):  # compose files pass absent variables as empty
            text = environment[setting.variable]
            value, origin = (text.split(",") if setting.is_list else text), setting.variable
        elif setting.name in from_file:
            value, origin = from_file[setting.name], f"{setting.key} in {config_file}"
            if setting.type is str and isinstance(value, dict):  # a setting that takes JSON
                value = json.dumps(value)
        elif setting.name in (defaults or {}):
            value, origin = (defaults or {})[setting.name], setting.flag
        else:
            continue
        if setting.name in _OTHER_NAMES and isinstance(value, str):
            value = _OTHER_NAMES[setting.name].get(value, value)
        if setting.type is int and isinstance(value, str):
            value = _number_of(value)
        if setting.open is not None and value not in (None, *setting.open.words):
            _check_plugin(value, setting.open, origin)
        values[setting.section][setting.name] = value
        origins[setting.name] = origin
    sections = {}
    for name, section_type in sections_of(config_type).items():
        try:
            sections[name] = msgspec.convert(values[name], section_type, strict=False)
        except msgspec.ValidationError as error:
            raise SettingsError(_explain(error, origins, section_type)) from error
    return config_type(**sections)


def _check_plugin(name: object, known: OneOf, origin: str) -> None:
    from engine.shared.plugins import offered  # slow to import

    plugins = offered(known.plugins)
    if name not in plugins:
        words = ", ".join([*known.words, *plugins])
        raise SettingsError(
            f"{origin}: {name!r} is none of {words}, and no installed package has such an entry "
            f"point in {known.plugins}"
        )


_OTHER_NAMES = {"dtype": {"half": "float16", "float": "float32"}}
"""vLLM's aliases of setting values."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kKMGTmgt])(iB|i|B)?")


def _number_of(text: str) -> int | str:
    """Parse a size such as 4GiB, 32K or 1.5GB; return any other text unchanged.

    A unit with `i`, or a single capital letter, is a power of 1024, any other a power of 1000.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        return text
    number, unit, rest = found.groups()
    base = 1024 if rest in ("i", "iB") or (rest is None and unit.isupper()) else 1000
    return round(float(number) * float(base) ** ("kmgt".index(unit.lower()) + 1))


def _explain(
    error: msgspec.ValidationError, origins: Mapping[str, str], section: type[Section]
) -> str:
    message, _, path = str(error).partition(" - at `$.")
    name = path.rstrip("`").split("[")[0]
    if message.startswith("Invalid enum value"):
        described: Any = msgspec.inspect.type_info(section)
        known = {field.name: field.type for field in described.fields}
        choices = getattr(known[name], "types", (known[name],))
        values = [str(each) for choice in choices for each in getattr(choice, "values", ())]
        wrong = message.removeprefix("Invalid enum value ")
        message = f"{wrong} is none of {', '.join(values)}"
    where = f"{origins.get(name, name)}: " if name else ""  # cross-field checks have no name
    return f"{where}{message[0].lower()}{message[1:]}"


def _read_yaml(path: Path, config_type: type[Section]) -> dict[str, Any]:
    import yaml  # a tenth of the startup time, and rarely needed

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(f"--config {path}: {reason}") from error
    if not isinstance(content, dict):
        raise SettingsError(f"--config {path}: expected `key: value` lines")
    values = {str(key).replace("-", "_"): value for key, value in content.items()}
    known = {setting.name: setting.key for setting in settings_of(config_type)}
    for name in sorted(set(values) - set(known)):
        key = name.replace("_", "-")
        meant = suggestion(key, known.values())
        raise SettingsError(f"--config {path}: unknown setting {key}{meant}")
    return values
