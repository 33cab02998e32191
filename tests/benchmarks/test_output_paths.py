"""Commands know that they can write their results before they begin to work."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import engine_bench, side_by_side
from engine.shared.writable import writable_directory, writable_file
from server.bench import command
from server.bench.config import BenchConfig
from server.clients.batch_lines import OutputFile


class Worked(Exception):
    """The command has begun its work."""


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(*_: Any, **__: Any) -> None:
        raise Worked

    for module, name in (
        (command, "run"),
        (engine_bench, "measure"), (side_by_side, "compare"), (side_by_side, "read_results"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, begin)


def bench(path: Path) -> int:
    config = BenchConfig()
    report = msgspec.structs.replace(config.report, output=str(path), progress=False)
    return command.bench(msgspec.structs.replace(config, report=report))


def from_command_line(main: Any, *arguments: str) -> Any:
    def run(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.setattr(sys, "argv", ["command", *arguments, str(path)])
        return main()

    return run


COMMANDS: dict[str, Any] = {
    "swell bench": lambda path, _: bench(path),
    "engine_bench": from_command_line(engine_bench.main, "2-layer", "--json"),
    "side_by_side": from_command_line(
        side_by_side.main, "--peer-python", sys.executable, "--models", "/tmp", "--output"
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_missing_results_folder_is_created_before_work(
    work: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with pytest.raises(Worked):
        COMMANDS[name](tmp_path / "new" / "folder" / "result", monkeypatch)
    assert (tmp_path / "new" / "folder").is_dir()
    assert not (tmp_path / "new" / "folder" / "result").is_file()


@pytest.mark.parametrize("name", COMMANDS)
def test_unwritable_results_stop_before_work(
    work: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "file").touch()
    try:
        code = COMMANDS[name](tmp_path / "file" / "result", monkeypatch)
    except OSError:
        return
    assert code in (1, 2)


def test_batch_creates_output_folder(tmp_path: Path) -> None:
    with OutputFile(tmp_path / "new" / "out.jsonl") as output:
        assert not output.answered
    assert (tmp_path / "new" / "out.jsonl").is_file()


def test_existing_content_is_unchanged(tmp_path: Path) -> None:
    (tmp_path / "result").write_text("of an earlier run")
    assert writable_file(tmp_path / "result").read_text() == "of an earlier run"
    assert writable_directory(tmp_path) == tmp_path
    with pytest.raises(IsADirectoryError):
        writable_file(tmp_path)
