"""`swell completion SHELL`: prints a shell completion script for subcommands, flags and values."""

from typing import Annotated, Any, Literal

from engine.shared.config import Section
from server.flags import ARGUMENT, Commands, build_parser

_FILES = ("config", "chat_template", "dataset_path", "plot", "output", "ssl_ca_certs")
_FILE_ENDINGS = ("_file", "certfile", "keyfile")
_DIRECTORIES = ("model", "socket_dir", "torch_profiler_dir")


class ShellConfig(Section, frozen=True, kw_only=True):
    """Shell"""

    shell: Annotated[
        Literal["bash", "zsh", "fish", "tcsh"], "Shell whose completion script is printed."
    ] = "bash"


class CompletionConfig(Section, frozen=True, kw_only=True):
    """All settings of `swell completion`."""

    shell: ShellConfig = ShellConfig()


def script(commands: Commands, shell: str) -> str:
    """Return the completion script of a shell; it is static, so completion is fast."""
    import shtab

    parser = build_parser(commands)
    subparsers: Any = next(a for a in parser._actions if isinstance(a.choices, dict))
    for name, command in commands.items():
        words = {setting.name: setting.choices for setting in command.settings}
        for action in subparsers.choices[name]._actions:
            setting = action.dest.removesuffix(ARGUMENT)
            action.choices = words.get(setting) or None
            action.help = None if action.help is None else action.help.split("; ")[0]
            if action.help is not None:  # only the first clause, for zsh and fish
                action.help = action.help.split(": ")[0].rstrip(".")
            complete = _completer(setting)
            if complete is not None:
                action.complete = getattr(shtab, complete)
    return str(shtab.complete(parser, shell))


def _completer(name: str) -> str | None:
    if name in _DIRECTORIES:
        return "DIRECTORY"
    return "FILE" if name in _FILES or name.endswith(_FILE_ENDINGS) else None
