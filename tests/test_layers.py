"""Which package may import what; read from the sources."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

SHARED = {
    "engine", "engine.config", "engine.settings", "engine.messages", "engine.transport",
    "engine.handshakes", "engine.lifeline", "engine.logs", "engine.membership", "engine.reach",
    "engine.roster", "engine.model_files", "engine.health", "engine.heap", "engine.grammar_spec",
    "engine.group_config", "engine.version", "engine.writable",
    "engine.node_directory", "engine.log_stream",
    "engine.grammar_schema",
}  # fmt: skip
"""The torch-free modules of `engine` that the other packages build on."""

COMMAND_LINE = ROOT / "server" / "cli.py"
"""The command starts every kind of process, so it alone reaches into all packages."""


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_module(name: str) -> bool:
    path = ROOT / Path(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def own_imports(path: Path) -> set[str]:
    return {name for name in imports(path) if is_module(name)}


@pytest.mark.parametrize("path", sources("engine"), ids=str)
def test_the_engine_imports_neither_neighbour(path: Path) -> None:
    assert not {name for name in own_imports(path) if not name.startswith("engine")}


@pytest.mark.parametrize("path", sources("coordinator"), ids=str)
def test_the_coordinator_imports_itself_and_what_is_shared(path: Path) -> None:
    foreign = {name for name in own_imports(path) if not name.startswith("coordinator")}
    assert foreign <= SHARED
    assert not {name.split(".")[0] for name in imports(path)} & {"torch", "fastapi", "pydantic"}


@pytest.mark.parametrize("path", sources("server"), ids=str)
def test_the_server_imports_itself_and_what_is_shared(path: Path) -> None:
    if path == COMMAND_LINE:
        return
    foreign = {name for name in own_imports(path) if not name.startswith("server")}
    assert foreign <= SHARED | {"coordinator", "coordinator.config"}
    assert not {name.split(".")[0] for name in imports(path)} & {"torch", "transformers"}


@pytest.mark.parametrize("path", sources("engine/scheduler"), ids=str)
def test_scheduling_knows_no_tensors_sockets_or_clocks(path: Path) -> None:
    forbidden = {"torch", "numpy", "zmq", "time", "asyncio", "threading"}
    assert not {name.split(".")[0] for name in imports(path)} & forbidden


@pytest.mark.parametrize(
    "path",
    [ROOT / "coordinator/state.py", ROOT / "coordinator/wave.py", ROOT / "engine/lockstep/wave.py",
     ROOT / "coordinator/formation.py", ROOT / "engine/lockstep/seat.py",
     ROOT / "server/cluster/state.py", ROOT / "server/cluster/routing.py",
     ROOT / "server/cluster/dispatch.py", ROOT / "server/cluster/engine_times.py",
     ROOT / "server/cluster/outgoing.py", ROOT / "server/cluster/probation.py",
     ROOT / "server/cluster/suspicion.py", ROOT / "server/cluster/route.py",
     ROOT / "engine/front_end_lines.py",
     ROOT / "engine/front_end_books.py", ROOT / "coordinator/events.py",
     ROOT / "engine/membership.py", ROOT / "engine/roster.py"],
    ids=str,
)  # fmt: skip
def test_state_machines_know_no_sockets_or_clocks(path: Path) -> None:
    forbidden = {"zmq", "time", "asyncio", "threading", "socket"}
    assert not {name.split(".")[0] for name in imports(path)} & forbidden


TELLS_THE_TIME = {
    "server/app.py", "server/routes/responses.py", "server/routes/serve.py",
    "server/routes/status.py",
}  # fmt: skip
"""What tells clients when something was; all else measures durations, and the clock may be set."""


def test_no_duration_is_taken_from_a_clock_that_jumps() -> None:
    every = [path for package in ("engine", "coordinator", "server") for path in sources(package)]
    found = {str(path.relative_to(ROOT)) for path in every if "time.time()" in path.read_text()}
    assert found <= TELLS_THE_TIME


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("coordinator.process", "torch fastapi pydantic transformers numpy asyncio"),
        ("server.front_end", "torch transformers llguidance"),
        ("engine.process, engine.executor.in_process", "transformers llguidance"),
        ("server.processes.supervisor", "torch transformers fastapi pydantic tokenizers"),
        ("engine.receiver, engine.sender, engine.scheduler.scheduler", "torch transformers"),
    ],
)
def test_what_a_process_loads_at_run_time(modules: str, absent: str) -> None:
    program = (
        f"import sys, {modules}\n"
        f"loaded = [name for name in {absent.split()!r} if name in sys.modules]\n"
        "sys.exit(' '.join(loaded) or None)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=60)


INSTALLED = [path for package in ("server", "engine", "coordinator") for path in sources(package)]


def test_nothing_that_is_installed_imports_what_is_not() -> None:
    foreign = {"benchmarks", "tests", "scripts"}
    found = {path for path in INSTALLED if {n.split(".")[0] for n in imports(path)} & foreign}
    assert not found


def test_no_modules_import_each_other_in_a_circle() -> None:
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in INSTALLED}
    uses = {name: own_imports(path) & names.keys() for name, path in names.items()}
    left = set(uses)
    while free := {name for name in left if not uses[name] & left}:
        left -= free
    assert not left, "these are in circles, or lead into them"
