"""The `swell` command: subcommands, with settings from flags, environment variables and YAML.

Each subcommand imports its modules only when it runs, so that a minimal installation can run the
coordinator without the HTTP stack or torch.
"""

import importlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from coordinator.config import CoordinatorConfig, CoordinatorLaunch
from engine.shared import settings
from engine.shared.config import DEFAULT_COORDINATOR, EngineConfig, ModelConfig
from engine.shared.devices import num_cuda_devices
from engine.shared.logs import open_standard_descriptors
from engine.shared.process_state import raise_descriptor_limit
from engine.shared.version import SWELL_VERSION
from server.bench.config import BenchConfig
from server.clients.batch_config import RunBatchConfig
from server.clients.chat_config import ChatConfig
from server.completion import CompletionConfig
from server.config import ApiServerConfig, GuardConfig, ServeConfig
from server.config.commands import defaults_for
from server.config.display import changed_settings
from server.config.tools import (
    CachedConfig,
    DoctorConfig,
    FetchConfig,
    ScaleConfig,
    ShardedConfig,
    StatusConfig,
)
from server.flags import Command, parse
from server.ineffective import ineffective_settings

logger = logging.getLogger(__name__)


def _serve(config: ServeConfig) -> int:
    if config.parallel.node_rank:
        from server.fleet.backend import BadNode, check_span

        try:
            check_span(config)
        except BadNode as error:
            print(f"swell cannot start: {error}", file=sys.stderr)
            return 1
        return _other_node(config.engine())
    from engine.shared.logs import name_process
    from server.fleet import supervisor

    name_process("supervisor", config.log.log_level, config.log.log_format)
    logger.info("Swell %s, settings: %s", SWELL_VERSION, changed_settings(config))
    return supervisor.run(config)


def _other_node(config: EngineConfig) -> int:
    """Run the workers of an engine whose leader is on the first node."""
    from engine.executor.nodes import joining
    from engine.shared.cpu.plan import BadCpuBind
    from engine.shared.logs import name_process
    from server.fleet.node_resources import of_standalone_engine

    number = config.parallel.node_rank
    name_process(f"node {number}", config.log.log_level, config.log.log_format)
    single_rank = {"data_parallel_size_local": 1, "data_parallel_rank_local": 0}
    try:
        config = of_standalone_engine(config.changed(parallel=single_rank))
    except BadCpuBind as error:
        print(f"swell cannot start: {error}", file=sys.stderr)
        return 1
    return joining.run(config)


def _coordinator(config: CoordinatorConfig) -> int:
    from coordinator import process
    from engine.shared.lifeline import Lifeline

    return process.run(CoordinatorLaunch(config), Lifeline(None))


def _engine(config: EngineConfig) -> int:
    from engine.process import main as process
    from engine.shared.cpu.plan import BadCpuBind
    from engine.shared.lifeline import CANNOT_START, Lifeline
    from server.fleet.node_resources import of_standalone_engine

    if config.parallel.node_rank:
        return _other_node(config)
    if config.parallel.data_parallel_size_local is None:
        config = config.changed(parallel={"data_parallel_size_local": 1})
    lifeline = Lifeline(None)
    try:
        config = of_standalone_engine(config)
    except BadCpuBind as error:
        lifeline.failed(str(error))
        return CANNOT_START
    return process.run(config, lifeline)


def _api_server(config: ApiServerConfig) -> int:
    if config.supervisor.api_server_count == 1:
        from engine.shared.lifeline import Lifeline
        from server import front_end

        launch = front_end.FrontEndLaunch(config.front_end(), -1, secrets.randbits(48))
        return front_end.run(launch, Lifeline(None))
    if config.cluster.coordinator is None:
        config = config.changed(cluster={"coordinator": DEFAULT_COORDINATOR})
    return _serve(config.node())


def _imported(module: str, function: str) -> Callable[[Any], int]:
    def run(config: Any) -> int:
        code: int = getattr(importlib.import_module(module), function)(config)
        return code

    return run


def _save_sharded_state(config: ShardedConfig) -> int:
    from server import fetch

    def save(model: Path, output: Path, size: int) -> list[Path]:
        from engine.models.parallel import sharded_state

        return sharded_state.save_sharded_state(model, output, size)

    return fetch.save_sharded_state(config, save)


def _doctor(config: DoctorConfig) -> int:
    from server import doctor

    def processor() -> str:
        from engine.kernels import processor as processors

        kind, found = processors.kind(), processors.detected_kind()
        taken = f", taken for {kind}" if kind != found else ""
        return f"{found}{taken}; kernels for {kind.target}"

    return doctor.doctor(config, processor)


def _completion(config: CompletionConfig) -> int:
    from server import completion

    print(completion.script(COMMANDS, config.shell.shell), end="")
    return 0


SPAN = frozenset({"nnodes", "node_rank", "master_addr", "master_port"})
"""Settings of an engine that spans nodes, for commands that run its processes."""

MODEL = ("model", "model directory or hub id; the bundled model if absent")

COMMANDS = {
    "serve": Command(
        "run a coordinator, engines and API servers on this node",
        "swell serve                              # the bundled model on port 8000\n"
        "swell serve Qwen/Qwen3-0.6B --data-parallel-size 4 --port 8080\n"
        "swell serve --data-parallel-address 10.0.0.1            # the first of several nodes\n"
        "swell serve --data-parallel-address 10.0.0.1 --headless # the others\n"
        "swell serve --data-parallel-size 1 --pipeline-parallel-size 2 --nnodes 2 \\\n"
        "    --master-addr 10.0.0.1 --node-rank 0   # one engine on two nodes, the first of them\n"
        "swell serve --data-parallel-backend ray --data-parallel-size-local 1\n"
        "swell serve --cpu-bind '1-31|33-63'                     # CPUs of either engine",
        ServeConfig,
        _serve,
        positional=MODEL,
        hidden=frozenset({"data_parallel_rank_local"}),
    ),
    "coordinator": Command(
        "run only the coordinator",
        "swell coordinator --coordinator '*:7550' --cluster-key-file /run/secrets/key",
        CoordinatorConfig,
        _coordinator,
    ),
    "engine": Command(
        "run one engine that joins a coordinator",
        "swell engine ./my-model --coordinator head:7550 --cluster-key-file /run/secrets/key",
        EngineConfig,
        _engine,
        positional=MODEL,
    ),
    "api-server": Command(
        "run API servers that join a coordinator",
        "swell api-server ./my-model --coordinator head:7550 --host '*' --port 8000",
        ApiServerConfig,
        _api_server,
        positional=MODEL,
        hidden=frozenset(
            {
                "data_parallel_size_local",
                "data_parallel_start_rank",
                "data_parallel_rank_local",
                "usage_report",
            }
        )
        | SPAN,
    ),
    "chat": Command(
        "converse in the terminal, with a running server or one started for it",
        "swell chat                                      # with http://127.0.0.1:8000\n"
        "swell chat ./model.gguf                         # serves it until you leave\n"
        "swell chat --url http://head:8000 --quick Hello",
        ChatConfig,
        _imported("server.clients.chat", "chat"),
        positional=("model", "model to serve meanwhile; without one --url is asked"),
        hidden=SPAN,
    ),
    "fetch": Command(
        "fetch a model of the Hugging Face hub before it is served",
        "swell fetch Qwen/Qwen3-0.6B\nswell fetch Qwen/Qwen3-0.6B --revision main --text-only\n"
        "swell fetch unsloth/Qwen3-0.6B-GGUF:Q4_K_M",
        FetchConfig,
        _imported("server.fetch", "fetch"),
        positional=("model", "hub id"),
    ),
    "models": Command(
        "show the fetched models with their sizes, or remove one",
        "swell models\nswell models --remove Qwen/Qwen3-0.6B",
        CachedConfig,
        _imported("server.fetch", "cached"),
    ),
    "save-sharded-state": Command(
        "cut a model's weights ahead, for a faster start with --tensor-parallel-size",
        "swell save-sharded-state Qwen/Qwen3-8B --tensor-parallel-size 2 --output ./qwen3-tp2\n"
        "swell serve ./qwen3-tp2 --tensor-parallel-size 2 --load-format sharded_state",
        ShardedConfig,
        _save_sharded_state,
        positional=("model", "model directory or hub id"),
    ),
    "scale": Command(
        "change the number of engines of a running node or cluster",
        "swell scale 4\nSWELL_ADMIN_KEY=... swell scale 2 --url http://head:8000",
        ScaleConfig,
        _imported("server.fleet.commands", "scale"),
        positional=("size", "number of engines; without it only shows what there is"),
    ),
    "status": Command(
        "show the engines of a running server, with their nodes and states",
        "swell status\nSWELL_ADMIN_KEY=... swell status --url http://head:8000",
        StatusConfig,
        _imported("server.fleet.commands", "status"),
    ),
    "doctor": Command(
        "say whether this machine can serve, for yourself or for a question to others",
        "swell doctor\nswell doctor --port 8080",
        DoctorConfig,
        _doctor,
    ),
    "run-batch": Command(
        "answer a file of requests, with a running server or one started for it",
        "swell run-batch in.jsonl out.jsonl --url http://127.0.0.1:8000\n"
        "swell run-batch -i in.jsonl -o out.jsonl --model Qwen/Qwen3-0.6B --data-parallel-size 4",
        RunBatchConfig,
        _imported("server.clients.batch", "run_batch"),
        hidden=frozenset(
            {
                "coordinator",
                "data_parallel_rank",
                "data_parallel_rank_local",
                "data_parallel_size_local",
            }
        )
        | SPAN,
        short={"input_file": "-i", "output_file": "-o"},
        files=("input_file", "output_file"),
    ),
    "bench": Command(
        "load a server and report latencies and throughput",
        "swell bench --max-concurrency 64 --random-input-len 100 --ignore-eos\n"
        "swell bench --url http://head:8000 --request-rate 20 --goodput ttft:500 tpot:50",
        BenchConfig,
        _imported("server.bench.command", "bench"),
    ),
    "completion": Command(
        "print the script that completes commands and flags in a shell",
        'eval "$(swell completion bash)"                # bash, in ~/.bashrc\n'
        'eval "$(swell completion zsh)"                 # zsh, in ~/.zshrc after compinit\n'
        "swell completion fish > ~/.config/fish/completions/swell.fish",
        CompletionConfig,
        _completion,
        positional=("shell", "bash, zsh, fish or tcsh"),
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Entry point of the `swell` command; returns the exit code."""
    open_standard_descriptors()
    raise_descriptor_limit()
    # Children must import installed modules only: a model directory may contain a server.py. Our
    # own children are started with -P; this covers children started by libraries.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    if os.getpid() == 1:
        # As PID 1 in a container a process gets no default signal actions.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    flags = parse(COMMANDS, sys.argv[1:] if argv is None else argv)
    command = COMMANDS[flags["command"]]
    try:
        load = partial(settings.load, command.config, flags, os.environ, flags["config"])
        config = load()
        if isinstance(config, ServeConfig | EngineConfig):
            config = load(defaults_for(config, num_cuda_devices()))
    except settings.SettingsError as error:
        print(f"swell {flags['command']}: {error}", file=sys.stderr)
        return 2
    guards = getattr(config, "guards", None)
    if isinstance(guards, GuardConfig) and not guards.has_keys and "VLLM_API_KEY" in os.environ:
        # Otherwise what vLLM protected would be open to everyone.
        print(
            f"swell {flags['command']}: VLLM_API_KEY is set, but Swell has no key: rename the "
            "variable to SWELL_API_KEY, or unset it",
            file=sys.stderr,
        )
        return 2
    model = getattr(config, "model", None)
    if isinstance(model, ModelConfig) and ":" in model.model:
        from engine.shared.model_files import ModelNotFound, with_local_file

        try:
            config = msgspec.structs.replace(config, model=with_local_file(model))
        except ModelNotFound as error:
            print(f"swell {flags['command']}: {error}", file=sys.stderr)
            return 1
    for warning in ineffective_settings(config):
        print(f"swell {flags['command']}: warning: {warning}", file=sys.stderr)
    every = (setting for known in COMMANDS.values() for setting in known.settings)
    for mistake in settings.misspelt_variables(os.environ, every):
        print(f"swell {flags['command']}: {mistake}", file=sys.stderr)
    return command.run(config)
