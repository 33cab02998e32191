"""Which package may import what; read from the sources."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.support.syntax import tree_of

ROOT = Path(__file__).parent.parent

COMMAND_LINE = ROOT / "server" / "cli.py"
"""The command starts every kind of process, so it alone reaches into all packages."""


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@cache
def imports(path: Path) -> frozenset[str]:
    names = set[str]()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


@cache
def is_module(name: str) -> bool:
    path = ROOT / Path(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def is_shared(name: str) -> bool:
    """Whether the name is of what the packages share, which is free of torch."""
    return name in {"engine", "engine.shared"} or name.startswith("engine.shared.")


def own_imports(path: Path) -> set[str]:
    return {name for name in imports(path) if is_module(name)}


def roots(path: Path) -> set[str]:
    """Return the packages that a module imports from."""
    return {name.partition(".")[0] for name in imports(path)}


def test_engine_imports_neither_server_nor_coordinator() -> None:
    assert {
        (path, name)
        for path in sources("engine")
        for name in own_imports(path)
        if not name.startswith("engine")
    } == set()


@pytest.mark.parametrize(
    ("package", "allowed", "forbidden"),
    [
        ("coordinator", set(), {"torch", "fastapi", "pydantic"}),
        ("server", {"coordinator", "coordinator.config"}, {"torch", "transformers"}),
    ],
)
def test_packages_import_only_themselves_and_shared_code(
    package: str, allowed: set[str], forbidden: set[str]
) -> None:
    paths = [path for path in sources(package) if path != COMMAND_LINE]
    assert {
        (path, name)
        for path in paths
        for name in own_imports(path) - allowed
        if not name.startswith(package) and not is_shared(name)
    } == set()
    assert {(path, *found) for path in paths if (found := roots(path) & forbidden)} == set()


def test_only_ray_backend_imports_ray() -> None:
    every = [path for package in ("engine", "coordinator", "server") for path in sources(package)]
    users = {path for path in every if "ray" in {name.split(".")[0] for name in imports(path)}}
    assert users == {ROOT / "server/fleet/ray/cluster.py"}
    home = ROOT / "server/fleet/ray"
    reaching = {path for path in every if any("server.fleet.ray" in n for n in imports(path))}
    assert {path for path in reaching if home not in path.parents} == {
        ROOT / "server/fleet/supervisor.py"
    }


ROUTER_SHELL = {"engine_client.py", "link.py", "token_stream.py"}
"""What of a front end's router knows of sockets, an event loop or a clock."""
STATE_MACHINES = [
    *(path for path in sources("server/router") if path.name not in ROUTER_SHELL),
    *(
        ROOT / name
        for name in (
            "coordinator/events.py", "coordinator/formation.py", "coordinator/groups.py",
            "coordinator/placement.py", "coordinator/state.py", "coordinator/wave.py",
            "engine/core/shutdown.py", "engine/core/halting.py", "engine/core/front_ends.py",
            "engine/core/wave_clock.py",
            "engine/kv/transfer_offers.py", "engine/kv/transfer_pull.py",
            "engine/lockstep/group_membership.py", "engine/lockstep/wave.py",
            "engine/process/reception.py", "engine/shared/cpu/lists.py",
            "engine/shared/cpu/plan.py", "engine/shared/membership.py", "engine/shared/roster.py",
            "server/fleet/ray/resources.py", "server/fleet/ray/packing.py",
        )
    ),
]  # fmt: skip
SOCKETS_AND_CLOCKS = {"zmq", "time", "asyncio", "threading", "socket"}


@pytest.mark.parametrize(
    ("paths", "forbidden"),
    [
        (sources("engine/scheduler"), SOCKETS_AND_CLOCKS | {"torch", "numpy"} - {"socket"}),
        (STATE_MACHINES, SOCKETS_AND_CLOCKS),
        (
            [p for p in sources("server/api") if p.stem in ("parse", "render", "schema")],
            SOCKETS_AND_CLOCKS | {"starlette", "fastapi", "server.http.call"},
        ),
    ],
    ids=["scheduling", "state machines", "what parses and renders"],
)
def test_state_machines_import_no_tensors_sockets_or_clocks(
    paths: list[Path], forbidden: set[str]
) -> None:
    assert all(path.is_file() for path in paths)
    assert {
        (path, *found) for path in paths if (found := (roots(path) | imports(path)) & forbidden)
    } == set()


TELLS_THE_TIME = {
    "server/api/services.py", "server/store/sqlite.py", "server/api/responses/request_storage.py",
    "server/api/generation.py", "server/api/status.py",
    "server/observe/engine_metrics.py", "server/api/vectors/pooled_call.py",
    "engine/kv/event_publisher.py", "server/fleet/usage_report.py",
}  # fmt: skip
"""What tells clients when something was; all else measures durations, and the clock may be set."""


def test_durations_use_monotonic_clocks() -> None:
    every = [path for package in ("engine", "coordinator", "server") for path in sources(package)]
    found = {str(path.relative_to(ROOT)) for path in every if "time.time()" in path.read_text()}
    assert found <= TELLS_THE_TIME


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("coordinator.process", "torch fastapi pydantic transformers numpy asyncio rich"),
        (
            "server.front_end",
            "torch transformers llguidance numpy PIL httpcore huggingface_hub rich psycopg "
            "opentelemetry.sdk pydantic.v1 yaml difflib server.api.admin "
            "server.fleet.supervisor server.bench server.clients "
            "engine.models engine.runner engine.scheduler engine.process",
        ),
        (
            "engine.process.main, engine.executor.in_process",
            "transformers llguidance fastapi pydantic tokenizers huggingface_hub ray sympy numba "
            "torch._dynamo torch._inductor "
            "engine.executor.encoding engine.executor.simulated",
        ),
        (
            "server.fleet.supervisor",
            "torch transformers fastapi pydantic tokenizers ray numpy uvicorn "
            "server.front_end engine.process engine.scheduler",
        ),
        (
            "engine.process.receiver, engine.core.sender, engine.scheduler.scheduler",
            "torch transformers",
        ),
    ],
)
def test_processes_do_not_load_unneeded_modules(modules: str, absent: str) -> None:
    program = (
        f"import sys, {modules}\n"
        f"loaded = [name for name in {absent.split()!r} if name in sys.modules]\n"
        "sys.exit(' '.join(loaded) or None)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=60)


INSTALLED = [path for package in ("server", "engine", "coordinator") for path in sources(package)]


def test_installed_packages_import_no_uninstalled_ones() -> None:
    foreign = {"benchmarks", "tests", "scripts"}
    found = {path for path in INSTALLED if {n.split(".")[0] for n in imports(path)} & foreign}
    assert not found


PACKAGES = """
engine.shared
engine.distributed engine.kernels engine.kv
engine.models
engine.lora
engine.batch
engine.grammar engine.scheduler
engine.core engine.runner
engine.executor engine.lockstep engine.vllm
engine.process
coordinator
server.limits server.tenant_budget server.helper_process
server.json_price
server.errors
server.control server.flags server.ineffective server.router server.schema server.store
server.config
server.bench server.completion server.doctor server.fetch
server.observe server.text
server.access server.answer server.media
server.fleet server.generate
server.clients server.http
server.upstreams
server.api
server.app
server.front_end
server.cli
"""
"""Each package imports only packages of the lines above its own."""


def test_packages_import_only_lower_layers() -> None:
    lines = PACKAGES.strip().splitlines()
    level = {name: number for number, line in enumerate(lines) for name in line.split()}

    def package_of(module: str) -> str | None:
        first, _, rest = module.partition(".")
        package = first if first == "coordinator" else f"{first}.{rest.partition('.')[0]}"
        return package if package in level else None

    upward = set[str]()
    for path in INSTALLED:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        package = package_of(module)
        if package is None:
            assert path.parent.parent == ROOT, f"{module}: its package is not in PACKAGES"
            continue
        for name in own_imports(path):
            used = package_of(name)
            if used is not None and used != package and level[used] >= level[package]:
                upward.add(f"{module} imports {name}")
    assert not upward


def test_there_are_no_import_cycles() -> None:
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in INSTALLED}
    uses = {name: own_imports(path) & names.keys() for name, path in names.items()}
    left = set(uses)
    while free := {name for name in left if not uses[name] & left}:
        left -= free
    assert not left, "these are in circles, or lead into them"
