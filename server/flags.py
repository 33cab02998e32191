"""The command line: flags of every subcommand, made from its settings, and how they are read."""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from engine.shared.config import Section
from engine.shared.settings import Setting, sections_of, settings_of, suggestion
from engine.shared.version import SWELL_VERSION


class Command(NamedTuple):
    """One subcommand."""

    help: str
    example: str
    config: type[Section]
    positional: tuple[str, str] | None
    """Name and help text of the setting that may stand without its flag, before all others."""
    hidden: frozenset[str]
    run: Callable[[Any], int]
    short: Mapping[str, str] = {}
    """Short flags of settings."""
    files: tuple[str, ...] = ()
    """Further settings that may stand without their flags, in this order."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """The settings that may stand without their flags, in their order."""
        return (*((self.positional[0],) if self.positional else ()), *self.files)

    @property
    def settings(self) -> Iterator[Setting]:
        """The settings that it takes."""
        return (s for s in settings_of(self.config) if s.name not in self.hidden)


Commands = Mapping[str, Command]

ARGUMENT = "_argument"
"""Ending of the name under which a setting is read that stands without its flag."""


def parse(commands: Commands, argv: list[str]) -> dict[str, Any]:
    """Return what the command line says, by names of settings; `command` is the subcommand.

    Ends the process with status 2 and a reason if it cannot be understood.
    """
    name = next((word for word in argv if not word.startswith("-")), "")
    if name and name not in commands:
        meant = suggestion(name, commands)
        print(
            f"swell: unknown command {name}{meant or f': there are {_listed(commands)}'}",
            file=sys.stderr,
        )
        sys.exit(2)
    arguments, unknown = build_parser(commands, only=name).parse_known_args(argv)
    if unknown:
        print(f"swell {name}: {_explain(commands, name, unknown)}", file=sys.stderr)
        sys.exit(2)
    flags = vars(arguments)
    for setting in commands[name].arguments:
        argument = flags[setting + ARGUMENT]
        if argument is not None and flags[setting] not in (None, argument):
            flag = f"--{setting.replace('_', '-')}"
            print(
                f"swell {name}: {argument} and {flag} {flags[setting]}: give one of them",
                file=sys.stderr,
            )
            sys.exit(2)
        flags[setting] = flags[setting] or argument
    return flags


def _explain(commands: Commands, name: str, unknown: list[str]) -> str:
    """Say what may have been meant by arguments that the command does not have."""
    flag = next((word.split("=")[0] for word in unknown if word.startswith("-")), None)
    if flag is None:
        return f"unexpected argument {unknown[0]}"
    known = [word for s in commands[name].settings for word in _flags_of(s)] + ["--config"]
    meant = suggestion(flag, known)
    others = [
        f"`swell {other}`"
        for other, command in commands.items()
        if any(flag in _flags_of(setting) for setting in command.settings)
    ]
    if others and not meant:
        meant = f": it is a flag of {_listed(others)}"
    return f"unknown flag {flag}{meant or f' (`swell {name} --help` lists all)'}"


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _flags_of(setting: Setting) -> list[str]:
    return [setting.flag] + ([f"--no-{setting.key}"] if setting.is_bool else [])


def build_parser(commands: Commands, only: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the whole command, with the flags of all subcommands or `only` one."""
    parser = argparse.ArgumentParser(
        prog="swell",
        description="OpenAI-compatible serving for data-parallel LLM engines.",
        epilog="example:\n  swell serve\n  curl http://127.0.0.1:8000/v1/models",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"swell {SWELL_VERSION}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in commands.items():
        examples = "\n".join(f"  {line}" for line in command.example.splitlines())
        subparser = subparsers.add_parser(
            name,
            help=command.help,
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            epilog=f"examples:\n{examples}\n\nEvery flag --some-name is also the variable "
            "SWELL_SOME_NAME and the key some-name in the --config file.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if only in (None, name):
            _add_arguments(subparser, command)
    return parser


def _add_arguments(parser: argparse.ArgumentParser, command: Command) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with settings.")
    if command.positional is not None:
        name, text = command.positional
        parser.add_argument(name + ARGUMENT, nargs="?", metavar=name.upper(), help=text)
    for name in command.files:
        parser.add_argument(name + ARGUMENT, nargs="?", metavar=name.upper())
    groups: dict[str, Any] = {}
    types_of = sections_of(command.config)
    for setting in command.settings:
        if setting.section not in groups:
            groups[setting.section] = parser.add_argument_group(title(types_of[setting.section]))
        options: dict[str, Any] = {"dest": setting.name, "help": _help_text(setting)}
        if setting.is_bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = _metavar(setting)
            if setting.is_list:
                options["nargs"] = "+"
        short = [command.short[setting.name]] if setting.name in command.short else []
        groups[setting.section].add_argument(*short, setting.flag, default=None, **options)


def title(section: type[Section]) -> str:
    """Return the heading of a section's settings: its docstring's first line."""
    return (section.__doc__ or section.__name__).splitlines()[0]


def _metavar(setting: Setting) -> str:
    if setting.choices:
        return "{" + ",".join(setting.choices) + "}"
    return {int: "N", float: "X"}.get(setting.type, "TEXT")


def _help_text(setting: Setting) -> str:
    text = setting.help.replace("%", "%%")
    if setting.default in (None, (), "") or setting.name == "model":
        return text
    default = setting.default
    if setting.is_bool:
        default = str(default).lower()
    elif setting.is_list:
        default = " ".join(map(str, default))
    return f"{text} (default: {default})"
