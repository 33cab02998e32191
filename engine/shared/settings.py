"""Settings defined once: from typed Structs come flags, environment variables, YAML keys and docs.

A config is a Struct whose fields are sections (`engine.shared.config.Section`); the fields of
sections are settings. For a setting `max_num_seqs` the flag is `--max-num-seqs`, the variable
`SWELL_MAX_NUM_SEQS` and the YAML key `max-num-seqs` (or `max_num_seqs`). A flag wins over a
variable, a variable over the file, the file over the default.
"""

import argparse
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union

import msgspec
import yaml

from engine.shared.config import Section

ENV_PREFIX = "SWELL_"

C = TypeVar("C", bound=Section)


class SettingsError(ValueError):
    """A setting has a value that it cannot have; the message names it and where it came from."""


class Setting(NamedTuple):
    """One setting of a section."""

    section: str
    name: str
    type: Any
    default: Any
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

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
        """The allowed words of a Literal setting, else empty."""
        return typing.get_args(self.type) if typing.get_origin(self.type) is Literal else ()

    @property
    def metavar(self) -> str:
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        return {int: "N", float: "X"}.get(self.type, "TEXT")


def sections_of(config_type: type[Section]) -> dict[str, type[Section]]:
    """Return the sections of a config type by field name."""
    hints = typing.get_type_hints(config_type)
    return {name: hints[name] for name in config_type.__struct_fields__}


def settings_of(config_type: type[Section]) -> Iterator[Setting]:
    """Yield every setting of a config type, in the order of definition."""
    for section, section_type in sections_of(config_type).items():
        annotated = typing.get_type_hints(section_type, include_extras=True)
        for field in msgspec.structs.fields(section_type):
            [text] = [m for m in annotated[field.name].__metadata__ if isinstance(m, str)]
            yield Setting(section, field.name, _plain(field.type), field.default, text)


def _plain(annotation: Any) -> Any:
    """Strip bounds and an alternative None from an annotation."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _plain(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return _plain(next(a for a in typing.get_args(annotation) if a is not types.NoneType))
    return annotation


def add_arguments(
    parser: argparse.ArgumentParser,
    config_type: type[Section],
    hidden: frozenset[str],
    short: Mapping[str, str] = {},
) -> None:
    """Add a flag for every setting but the `hidden` ones, grouped by section.

    `short` gives settings a short flag besides.
    """
    groups: dict[str, Any] = {}
    types_of = sections_of(config_type)
    for setting in settings_of(config_type):
        if setting.name in hidden:
            continue
        if setting.section not in groups:
            title = (types_of[setting.section].__doc__ or setting.section).splitlines()[0]
            groups[setting.section] = parser.add_argument_group(title)
        options: dict[str, Any] = {"dest": setting.name, "help": _help_text(setting)}
        if setting.is_bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = setting.metavar
            if setting.is_list:
                options["nargs"] = "+"
        flags = [setting.flag]
        if setting.name in short:
            flags.insert(0, short[setting.name])
        groups[setting.section].add_argument(*flags, default=None, **options)


def _help_text(setting: Setting) -> str:
    text = setting.help.replace("%", "%%")
    if setting.default in (None, ()) or setting.name == "model":
        return text
    default = str(setting.default).lower() if setting.is_bool else setting.default
    return f"{text} (default: {default})"


def load(
    config_type: type[C],
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    config_file: Path | None = None,
) -> C:
    """Build a config from flags, environment and YAML file, and check every value.

    Raises:
        SettingsError: an unknown key, a value of the wrong type or out of its bounds.
    """
    from_file = _read_yaml(config_file, config_type) if config_file else {}
    values: dict[str, dict[str, Any]] = {name: {} for name in sections_of(config_type)}
    origins: dict[str, str] = {}
    for setting in settings_of(config_type):
        if flags.get(setting.name) is not None:
            value, origin = flags[setting.name], setting.flag
        elif environment.get(setting.variable):  # set but empty is how compose files say absent
            text = environment[setting.variable]
            value, origin = (text.split(",") if setting.is_list else text), setting.variable
        elif setting.name in from_file:
            value, origin = from_file[setting.name], f"{setting.name} in {config_file}"
        else:
            continue
        values[setting.section][setting.name] = value
        origins[setting.name] = origin
    sections = {}
    for name, section_type in sections_of(config_type).items():
        try:
            sections[name] = msgspec.convert(values[name], section_type, strict=False)
        except msgspec.ValidationError as error:
            raise SettingsError(_explain(error, origins)) from error
    return config_type(**sections)


def _explain(error: msgspec.ValidationError, origins: Mapping[str, str]) -> str:
    message, _, path = str(error).partition(" - at `$.")
    name = path.rstrip("`").split("[")[0]
    where = f"{origins.get(name, name)}: " if name else ""  # some checks compare several settings
    return f"{where}{message[0].lower()}{message[1:]}"


def _read_yaml(path: Path, config_type: type[Section]) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise SettingsError(f"--config {path}: {error}") from error
    if not isinstance(content, dict):
        raise SettingsError(f"--config {path}: expected `key: value` lines")
    values = {str(key).replace("-", "_"): value for key, value in content.items()}
    unknown = set(values) - {setting.name for setting in settings_of(config_type)}
    if unknown:
        raise SettingsError(f"--config {path}: unknown setting(s) {', '.join(sorted(unknown))}")
    return values


def markdown_table(config_type: type[Section]) -> str:
    """Return the reference table of all settings, for docs/settings.md."""
    lines = []
    section = None
    for setting in settings_of(config_type):
        if setting.section != section:
            section = setting.section
            title = (sections_of(config_type)[section].__doc__ or section).splitlines()[0]
            lines += ["", f"## {title}", "", "| flag | variable | default | what |"]
            lines += ["|---|---|---|---|"]
        default = (
            "" if setting.default in (None, ()) or setting.name == "model" else setting.default
        )
        lines.append(f"| `{setting.flag}` | `{setting.variable}` | {default} | {setting.help} |")
    return "\n".join(lines[1:]) + "\n"
