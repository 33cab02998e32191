"""Command-line parsing: the flags of every subcommand, generated from its settings."""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from engine.shared.config import Section
from engine.shared.settings import Setting, sections_of, settings_of, suggestion
from engine.shared.version import SWELL_VERSION

NOT_NEEDED = {
    "--disable-cascade-attn": "there is no cascade attention, nor in vLLM 0.32",
    "--disable-frontend-multiprocessing": "front ends and engines are always processes",
    "--disable-log-requests": "requests are logged with --log-level debug only",
    "--disable-uvicorn-access-log": "HTTP answers are logged with --access-log only",
    "--enable-elastic-ep": "`swell scale` changes the number of engines while they serve",
    "--enable-offline-docs": "/docs needs no internet",
    "--enable-prompt-tokens-details": "`usage` always says how much was cached",
    "--enable-request-id-headers": "every answer has X-Request-Id",
    "--enable-server-load-tracking": "/load always says it",
    "--enable-sleep-mode": "engines can always be put to sleep",
    "--enable-ssl-refresh": "certificates are read again when they change",
    "--trust-remote-code": "code that comes with a model is never run",
}
"""Flags without a value that request permanent behaviour, and an explanation."""

INSTEAD = {
    "--all2all-backend": "experts exchange over torch.distributed",
    "--chat-template-content-format": "it is found in the chat template",
    "--compilation-config": "leave it out; --enforce-eager turns graphs and fused kernels off",
    "--cpu-offload-gb": "weights are on one device; --tensor-parallel-size divides them",
    "--cudagraph-capture-sizes": "leave it out; --enforce-eager turns graphs off",
    "--data-parallel-external-lb": "every API server reaches all engines: use --coordinator",
    "--data-parallel-hybrid-lb": "every API server reaches all engines: use --coordinator",
    "--disable-custom-all-reduce": "leave it out",
    "--disable-log-stats": "use --log-stats-interval 0",
    "--distributed-executor-backend": "leave it out; --data-parallel-backend ray is for Ray",
    "--download-dir": "set HF_HOME",
    "--enable-log-requests": "use --log-level debug",
    "--hf-overrides": "change a copy of config.json",
    "--hf-token": "set HF_TOKEN",
    "--kv-offloading-backend": "use --kv-memory-tier-bytes or --kv-disk-tier-dir",
    "--kv-offloading-size": "use --kv-memory-tier-bytes, in bytes or as 8GiB",
    "--logits-processors": "install a plugin (docs/plugins.md)",
    "--max-num-queued-reqs": "use --max-queue",
    "--max-num-queued-tokens": "use --max-queue-tokens",
    "--mm-processor-cache-gb": "leave it out; --encoder-cache-bytes keeps encoded images",
    "--num-gpu-blocks-override": "use --num-kv-blocks",
    "--profiler-config": "use --torch-profiler-dir",
    "--reasoning-parser-plugin": "install a plugin (docs/plugins.md)",
    "--response-role": "answers have the role assistant",
    "--scheduler-cls": "install a plugin for --admission-policy (docs/plugins.md)",
    "--speculative-config": "use --speculative-model or --speculative-ngram",
    "--sse-keep-alive-interval": "use --sse-keep-alive",
    "--structured-outputs-config": "leave it out; docs/structured-outputs.md says what is served",
    "--swap-space": "leave it out; --kv-memory-tier-bytes keeps KV blocks in host memory",
    "--task": "use --runner",
    "--tokenizer": "the tokenizer is the model's own",
    "--tokenizer-mode": "leave it out",
    "--tool-parser-plugin": "install a plugin (docs/plugins.md)",
    "--uvicorn-log-level": "use --log-level",
    "--worker-cls": "install a plugin for --engine-backend (docs/plugins.md)",
    "--worker-extension-cls": "use --worker-extensions",
}
"""Alternatives to other flags."""


class Command(NamedTuple):
    """One subcommand."""

    help: str
    example: str
    config: type[Section]
    run: Callable[[Any], int]
    positional: tuple[str, str] | None = None
    """Name and help text of the setting that can be given as the first positional argument."""
    hidden: frozenset[str] = frozenset()
    short: Mapping[str, str] = {}
    """Short flags of settings."""
    files: tuple[str, ...] = ()
    """Further settings that can be given as positional arguments, in this order."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Settings that can be given as positional arguments, in order."""
        return (*((self.positional[0],) if self.positional else ()), *self.files)

    @property
    def settings(self) -> Iterator[Setting]:
        """The command's settings."""
        return (s for s in settings_of(self.config) if s.name not in self.hidden)


Commands = Mapping[str, Command]

COMMON = frozenset(
    (
        "served_model_name", "dtype", "quantization", "max_model_len", "device", "chat_template",
        "gpu_memory_utilization", "max_num_seqs", "speculative_model", "threads", "enable_lora",
        "data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size",
        "enable_expert_parallel", "coordinator", "data_parallel_address", "headless", "host",
        "port", "api_key", "api_key_file", "admin_key", "ssl_certfile", "tool_call_parser",
        "reasoning_parser", "api_server_count", "shutdown_timeout", "log_level",
    )
)  # fmt: skip
"""Settings in `--help` of commands that have many; `--help-all` shows the rest."""
_MANY = 40
TUNING = frozenset(
    (
        "long_prefill_token_threshold", "max_slowdown", "speculative_row_price",
        "speculative_disable_by_batch_size", "admission_cadence", "level_wait_weight",
        "level_hold_per_rank", "simulated_step_us", "simulated_token_us", "eplb_step_interval",
        "publish_interval", "publish_idle_interval", "heartbeat_interval",
    )
)  # fmt: skip
"""Tuning settings, set by `--tuning KEY=VALUE`; their own flags still work."""

ARGUMENT = "_argument"
"""Suffix of the parsed name of a setting given as a positional argument."""


def parse(commands: Commands, argv: list[str]) -> dict[str, Any]:
    """Parse the command line to values by setting name; `command` is the subcommand.

    Exits with status 2 and an error message if it is invalid.
    """
    name = next((word for word in argv if not word.startswith("-")), "")
    if name and name not in commands:
        meant = suggestion(name, commands)
        print(
            f"swell: unknown command {name}{meant or f': there are {_listed(commands)}'}",
            file=sys.stderr,
        )
        sys.exit(2)
    everything = "--help-all" in argv
    if everything:
        argv = [name, "--help"] if name else ["--help"]
    parser = build_parser(commands, only=name, everything=everything)
    arguments, unknown = parser.parse_known_args(argv)
    for flag in [word for word in unknown if word in NOT_NEEDED]:
        print(f"swell {name}: {flag} is not needed: {NOT_NEEDED[flag]}", file=sys.stderr)
        unknown.remove(flag)
    if unknown:
        print(f"swell {name}: {_explain(commands, name, unknown)}", file=sys.stderr)
        sys.exit(2)
    flags = vars(arguments)
    tunable = TUNING & {each.name for each in commands[name].settings}
    for text in flags.pop("tuning", None) or ():
        key, given, value = text.partition("=")
        setting = key.replace("-", "_")
        if not given or setting not in tunable:
            known = sorted(tunable)
            meant = suggestion(setting, known) or f": there are {_listed(known)}"
            print(f"swell {name}: --tuning {text} is not KEY=VALUE{meant}", file=sys.stderr)
            sys.exit(2)
        flags[setting] = value
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
    flag = next((word.split("=")[0] for word in unknown if word.startswith("-")), None)
    if flag is None:
        return f"unexpected argument {unknown[0]}"
    instead = INSTEAD.get(flag.split(".")[0])
    if instead is not None:
        return f"{flag} is vLLM's: {instead}"
    known = [word for s in commands[name].settings for word in _flags_of(s)] + ["--config"]
    meant = suggestion(flag, known)
    others = [
        f"`swell {other}`"
        for other, command in commands.items()
        if any(flag in _flags_of(setting) for setting in command.settings)
    ]
    if others and not meant:
        meant = f": it is a flag of {_listed(others)}"
    return f"unknown flag {flag}{meant or f' (`swell {name} --help-all` lists all)'}"


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _flags_of(setting: Setting) -> list[str]:
    return [setting.flag] + ([f"--no-{setting.key}"] if setting.is_bool else [])


def build_parser(
    commands: Commands, only: str | None = None, *, everything: bool = True
) -> argparse.ArgumentParser:
    """Build the parser of the whole command.

    Args:
        only: the subcommand to add flags for; None for all.
        everything: whether `--help` of commands with many settings shows all of them.
    """
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
            usage=" ".join(
                ["swell", name, *(f"[{each.upper()}]" for each in command.arguments), "[flags]"]
            ),
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            epilog=f"examples:\n{examples}\n\nEvery flag --some-name is also the variable "
            "SWELL_SOME_NAME and the key some-name in the --config file.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if only in (None, name):
            _add_arguments(subparser, command, everything)
    return parser


def _add_arguments(parser: argparse.ArgumentParser, command: Command, everything: bool) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with settings.")
    settings = list(command.settings)
    if len(settings) > _MANY:
        parser.add_argument(
            "--help-all", action="store_true", help=f"show all {len(settings)} flags and exit"
        )
        parser.add_argument(
            "--tuning",
            nargs="+",
            metavar="KEY=VALUE",
            help="Settings for measurements: "
            f"{', '.join(sorted(TUNING & {setting.name for setting in settings}))}."
            if everything
            else argparse.SUPPRESS,
        )
    else:
        everything = True
    if command.positional is not None:
        name, text = command.positional
        parser.add_argument(name + ARGUMENT, nargs="?", metavar=name.upper(), help=text)
    for name in command.files:
        parser.add_argument(name + ARGUMENT, nargs="?", metavar=name.upper())
    groups: dict[str, Any] = {}
    types_of = sections_of(command.config)
    for setting in settings:
        if setting.section not in groups:
            groups[setting.section] = parser.add_argument_group(title(types_of[setting.section]))
        shown = everything or setting.name in COMMON
        options: dict[str, Any] = {
            "dest": setting.name,
            "help": _help_text(setting) if shown else argparse.SUPPRESS,
        }
        if setting.is_bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = {int: "N", float: "X"}.get(setting.type, "TEXT")
            if setting.choices:
                options["metavar"] = "{" + ",".join(setting.choices) + "}"
            if setting.is_list:
                options |= {"nargs": "+", "action": "extend"}
        short = [command.short[setting.name]] if setting.name in command.short else []
        groups[setting.section].add_argument(*short, setting.flag, default=None, **options)


def title(section: type[Section]) -> str:
    """Return the heading of a section's settings: its docstring's first line."""
    return (section.__doc__ or section.__name__).splitlines()[0]


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
