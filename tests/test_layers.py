"""Which package may import what; read from the sources."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from scripts import house_figures
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


@pytest.mark.parametrize("path", sources("engine"), ids=str)
def test_the_engine_imports_neither_neighbour(path: Path) -> None:
    assert not {name for name in own_imports(path) if not name.startswith("engine")}


@pytest.mark.parametrize("path", sources("coordinator"), ids=str)
def test_the_coordinator_imports_itself_and_what_is_shared(path: Path) -> None:
    foreign = {name for name in own_imports(path) if not name.startswith("coordinator")}
    assert not {name for name in foreign if not is_shared(name)}
    assert not {name.split(".")[0] for name in imports(path)} & {"torch", "fastapi", "pydantic"}


@pytest.mark.parametrize("path", sources("server"), ids=str)
def test_the_server_imports_itself_and_what_is_shared(path: Path) -> None:
    if path == COMMAND_LINE:
        return
    foreign = {name for name in own_imports(path) if not name.startswith("server")}
    allowed = {"coordinator", "coordinator.config"}
    assert not {name for name in foreign - allowed if not is_shared(name)}
    assert not {name.split(".")[0] for name in imports(path)} & {"torch", "transformers"}


def test_ray_is_for_the_ray_backend_alone() -> None:
    every = [path for package in ("engine", "coordinator", "server") for path in sources(package)]
    users = {path for path in every if "ray" in {name.split(".")[0] for name in imports(path)}}
    assert users == {ROOT / "server/fleet/ray/cluster.py"}
    home = ROOT / "server/fleet/ray"
    reaching = {path for path in every if any("server.fleet.ray" in n for n in imports(path))}
    assert {path for path in reaching if home not in path.parents} == {
        ROOT / "server/fleet/backend_choice.py"
    }


@pytest.mark.parametrize("path", sources("engine/scheduler"), ids=str)
def test_scheduling_knows_no_tensors_sockets_or_clocks(path: Path) -> None:
    forbidden = {"torch", "numpy", "zmq", "time", "asyncio", "threading"}
    assert not {name.split(".")[0] for name in imports(path)} & forbidden


ROUTER_SHELL = {"engine_client.py", "link.py", "token_stream.py"}
"""What of a front end's router knows of sockets, an event loop or a clock."""


@pytest.mark.parametrize(
    "path",
    [ROOT / "coordinator/state.py", ROOT / "coordinator/wave.py", ROOT / "engine/lockstep/wave.py",
     ROOT / "coordinator/formation.py", ROOT / "coordinator/groups.py",
     ROOT / "coordinator/expected.py",
     ROOT / "engine/lockstep/group_membership.py",
     *(path for path in sources("server/router") if path.name not in ROUTER_SHELL),
     ROOT / "engine/process/links.py", ROOT / "engine/process/reception.py",
     ROOT / "engine/process/turns.py", ROOT / "engine/process/ending.py",
     ROOT / "engine/core/halting.py", ROOT / "engine/core/wave_clock.py",
     ROOT / "engine/core/receive_counts.py", ROOT / "coordinator/events.py",
     ROOT / "engine/shared/membership.py", ROOT / "engine/shared/roster.py",
     ROOT / "engine/shared/cpu/lists.py", ROOT / "engine/shared/cpu/plan.py",
     ROOT / "server/fleet/forking/choice.py",
     ROOT / "server/fleet/ray/packing.py", ROOT / "server/fleet/ray/needs.py"],
    ids=str,
)  # fmt: skip
def test_state_machines_know_no_sockets_or_clocks(path: Path) -> None:
    forbidden = {"zmq", "time", "asyncio", "threading", "socket"}
    assert not {name.split(".")[0] for name in imports(path)} & forbidden


BELOW_ENDPOINTS = (
    "access", "answer", "generate", "http", "observe", "router", "text", "tool_calls",
)  # fmt: skip
SCHEMAS_OF_ALL = {
    f"server.api.shared.{name}"
    for name in ("answer", "body", "fields", "messages", "structured", "tools")
}


@pytest.mark.parametrize(
    "path", [path for name in BELOW_ENDPOINTS for path in sources(f"server/{name}")], ids=str
)
def test_below_the_endpoints_nothing_knows_one(path: Path) -> None:
    known = {name for name in own_imports(path) if name.startswith("server.api")}
    assert known <= SCHEMAS_OF_ALL


@pytest.mark.parametrize(
    "path",
    [path for path in sources("server/api") if path.stem in ("parse", "render", "schema")],
    ids=str,
)
def test_what_parses_and_renders_does_no_io(path: Path) -> None:
    forbidden = {"zmq", "time", "asyncio", "threading", "socket", "starlette", "fastapi"}
    assert not {name.split(".")[0] for name in imports(path)} & forbidden
    assert "server.http.call" not in own_imports(path)


TELLS_THE_TIME = {
    "server/app.py", "server/store/service.py", "server/api/responses/keeping.py",
    "server/api/generation.py", "server/api/status/endpoint.py",
    "server/observe/engine_metrics.py", "server/api/vectors.py",
}  # fmt: skip
"""What tells clients when something was; all else measures durations, and the clock may be set."""


def test_no_duration_is_taken_from_a_clock_that_jumps() -> None:
    every = [path for package in ("engine", "coordinator", "server") for path in sources(package)]
    found = {str(path.relative_to(ROOT)) for path in every if "time.time()" in path.read_text()}
    assert found <= TELLS_THE_TIME


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("coordinator.process", "torch fastapi pydantic transformers numpy asyncio rich"),
        (
            "server.front_end",
            "torch transformers llguidance numpy huggingface_hub rich psycopg opentelemetry.sdk "
            "server.fleet.supervisor server.batch server.bench server.chat "
            "engine.models engine.runner engine.scheduler engine.process",
        ),
        (
            "engine.process.main, engine.executor.in_process",
            "transformers llguidance fastapi pydantic tokenizers huggingface_hub ray sympy numba "
            "torch._dynamo torch._inductor engine.executor.multi_process "
            "engine.executor.encoding engine.executor.simulated",
        ),
        (
            "server.fleet.supervisor",
            "torch transformers fastapi pydantic tokenizers ray numpy uvicorn "
            "server.front_end engine.process engine.scheduler",
        ),
        (
            "engine.process.receiver, engine.process.sender, engine.scheduler.scheduler",
            "torch transformers",
        ),
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


LONGEST_FILE, LONGEST_FUNCTION = 420, 80
"""In lines; most are far shorter."""
LONGER = {"attend_tiles": 120}
"""Half of it are the arguments of a kernel, one a line, and what they are."""


def test_files_and_functions_can_be_read_at_once() -> None:
    lengths = {str(path): path.read_text(encoding="utf-8").count("\n") for path in INSTALLED}
    assert {path: lines for path, lines in lengths.items() if lines > LONGEST_FILE} == {}
    every = (each for path in INSTALLED for each in house_figures.functions(tree_of(path)))
    long = [each for each in every if each.lines > LONGEST_FUNCTION]
    assert [each for each in long if each.lines > LONGER.get(each.name, 0)] == []


def test_a_class_that_holds_much_says_why() -> None:
    silent = [
        f"{path}: {figures}"
        for path in INSTALLED
        for figures in house_figures.classes(tree_of(path))
        if figures.is_large
        and not re.search(r"[Mm]ore\s+(than\s+\d+\s+)?(attributes|methods)", figures.docstring)
    ]
    assert not silent
