"""Files in the current directory never run in place of Swell's own modules."""

import contextlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.running_stack import RunningStack
from tests.support.commands import run_swell
from tests.support.http import MODEL, call, completion

pytestmark = [pytest.mark.stack, pytest.mark.usefixtures("started_anew")]

ROOT = Path(__file__).parents[1]
NAMES = ("server", "engine", "coordinator", "multiprocessing", "msgspec")
"""Our packages, one of Python's and one of a library."""
SMALL = ("--data-parallel-size", "1", "--api-server-count", "1")


@pytest.fixture
def model_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with files that leave a mark if they are run."""
    directory = tmp_path / "model"
    directory.mkdir()
    for name in NAMES:
        mark = directory / f"{name}.ran"
        (directory / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    monkeypatch.chdir(directory)
    return directory


@contextlib.contextmanager
def nothing_runs_in(directory: Path) -> Iterator[None]:
    """Check that none of the directory's files is run meanwhile."""
    yield
    assert [each.name for each in directory.glob("*.ran")] == []


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the wheel's packages, and nothing of the source tree."""
    wheels = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
         "--no-index", "-w", str(wheels), str(ROOT)],
        check=True, timeout=300,
    )  # fmt: skip
    (wheel,) = wheels.glob("swell-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(wheels / "installed")
    return wheels / "installed"


def test_a_stack_and_a_benchmark_of_it_start_in_a_directory_that_holds_a_server_py(
    model_directory: Path,
) -> None:
    load = ("--num-prompts", "4", "--random-input-len", "8", "--random-output-len", "2")
    with nothing_runs_in(model_directory), RunningStack(*SMALL, "--start-method", "exec") as stack:
        assert call(f"{stack.url}/v1/completions", completion("Once", 4))["choices"]
        done = run_swell("bench", "--url", stack.url, *load)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_installed_wheel_serves_from_a_directory_that_holds_a_server_py(
    model_directory: Path, installed: Path
) -> None:
    with (
        nothing_runs_in(model_directory),
        # Kernels of another folder would be compiled anew.
        RunningStack(
            *SMALL,
            *("--enforce-eager", "--start-method", "fork"),
            environment={"PYTHONPATH": str(installed)},
        ) as stack,
    ):
        assert call(f"{stack.url}/v1/completions", completion("Once", 4))["choices"]
    assert _imported_from(installed) == installed / "engine" / "__init__.py"


def _imported_from(installed: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import engine; print(engine.__file__)"],
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return Path(done.stdout.strip())


def test_a_batch_starts_its_server_safely(model_directory: Path) -> None:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions",
            "body": {"model": MODEL, "prompt": "x", "max_tokens": 2}}  # fmt: skip
    Path("in.jsonl").write_text(json.dumps(line))
    with nothing_runs_in(model_directory):
        done = run_swell("run-batch", "-i", "in.jsonl", "-o", "out.jsonl")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 answered" in done.stderr
    response = json.loads(Path("out.jsonl").read_text())["response"]
    assert response["status_code"] == 200
    assert response["body"]["choices"][0]["text"]


def test_health_checks_run_the_installed_probe(model_directory: Path) -> None:
    """Dockerfile and compose files; the charts' probes are HTTP."""
    lines = [
        line
        for path in (ROOT / "docker").iterdir()
        if path.is_file()
        for line in path.read_text().splitlines()
        if "engine.probe" in line
    ]
    assert len(lines) >= 5
    for line in lines:
        words = line.replace('"', "").replace(",", " ").replace("[", " ").split()
        assert words[words.index("python3") + 1] == "-P", line
    with nothing_runs_in(model_directory):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "engine.probe", "SWELL_HEALTH_PORT", "/ready"],
            env={"SWELL_HEALTH_PORT": "1"}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert "refused" in done.stdout
