"""Selects quick tests: those of state machines and plain functions, for the inner loop.

They are not marked. A test file is quick if neither it nor the modules of `tests` and `benchmarks`
that it imports import anything that starts processes or uses sockets, and none of its imports loads
torch. `pytest --quick` collects no others, and fails a quick test that starts such things anyway.
Tests that are slow for other reasons have the marker `slow`.
"""

import re
import sys
from collections.abc import Generator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TENSORS = frozenset(("safetensors.torch", "torch", "transformers"))
"""Packages and modules that no quick test loads, not even indirectly."""
STARTERS = frozenset(
    (
        "benchmarks.running_stack", "httpx", "multiprocessing", "openai", "socket",
        "subprocess", "uvicorn", "uvloop", "zmq",
    )
)  # fmt: skip
"""Modules that neither quick tests nor the test modules they import may import."""
REFUSED = frozenset(
    ("os.fork", "os.posix_spawn", "os.system", "socket.bind", "socket.connect", "subprocess.Popen")
)
"""Audit events that fail a quick test."""

_IMPORT = re.compile(r"^(?:import ([\w.]+)|from ([\w.]+) import (\([^)]*\)|.*))", re.MULTILINE)


@cache
def is_quick(path: Path) -> bool:
    """Return whether a test file is quick."""
    seen, left = set[Path](), [path]
    while left:
        module = left.pop()
        if module in seen:
            continue
        seen.add(module)
        names = _imported(module)
        roots = {name.partition(".")[0] for name in names}
        is_ours = module.relative_to(ROOT).parts[0] in ("tests", "benchmarks")
        if (roots | names) & TENSORS or (is_ours and (roots | names) & STARTERS):
            return False
        left += [found for name in names if (found := _file_of(name)) is not None]
    return True


@cache
def _imported(path: Path) -> set[str]:
    """Return a file's top-level imports; indented ones run later or never."""
    names = set()
    for module, package, members in _IMPORT.findall(path.read_text(encoding="utf-8")):
        names.add(module or package)
        names.update(f"{package}.{member}" for member in re.findall(r"\w+", members))
    return names


@cache
def _file_of(name: str) -> Path | None:
    path = ROOT.joinpath(*name.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


class Guard:
    """Forbids importing torch, and processes and sockets while a test runs."""

    def __init__(self) -> None:
        self._runs = False
        sys.addaudithook(self._refuse)

    def _refuse(self, event: str, arguments: tuple[object, ...]) -> None:
        loads_tensors = event == "import" and arguments[0] in TENSORS
        if loads_tensors or (self._runs and event in REFUSED):
            raise pytest.UsageError(
                f"{f'import {arguments[0]}' if loads_tensors else event} in a quick test: import "
                "what does that at the top of the file of tests, or mark the test as `slow`"
            )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        """Enable the guard while a test runs."""
        self._runs = True
        try:
            return (yield)
        finally:
            self._runs = False


def add_option(parser: pytest.Parser) -> None:
    """Add `--quick`."""
    parser.addoption("--quick", action="store_true", help="collect only what is quick to run")


def configure(config: pytest.Config) -> None:
    """Deselect slow tests, and install the guard."""
    if config.getoption("quick"):
        given = config.option.markexpr
        config.option.markexpr = f"({given}) and not slow" if given else "not slow"
        config.pluginmanager.register(Guard())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore other test files with `--quick`."""
    is_file_of_tests = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if config.getoption("quick") and is_file_of_tests and not is_quick(collection_path):
        return True
    return None
