"""A node's private directory: new, locked, complete, and removed when its creator exits."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.shared.node_directory import NodeDirectory

HOLDER = """
import sys
from engine.shared.node_directory import NodeDirectory

directory = NodeDirectory(sys.argv[1])
(directory.path / "socket").touch()
print(directory.path, flush=True)
sys.stdin.read()
"""


class Holder:
    """Another process with a directory below the same parent."""

    def __init__(self, parent: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.path = Path(self.process.stdout.readline().strip())

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


def test_operator_files_in_directory_survive(tmp_path: Path) -> None:
    parent = tmp_path / "mine"
    parent.mkdir(mode=0o700)
    (parent / "thesis.txt").write_text("years of work")
    (parent / "swell-data").mkdir()
    (parent / "swell-data" / "model").write_text("weights")
    with NodeDirectory(str(parent)) as node:
        (node.path / "socket").touch()
        assert node.path.parent == parent
        assert node.path.stat().st_mode & 0o777 == 0o700
    assert (parent / "thesis.txt").read_text() == "years of work"
    assert (parent / "swell-data" / "model").read_text() == "weights"
    assert {path.name for path in parent.iterdir()} == {"thesis.txt", "swell-data"}


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    parent = tmp_path / "open"
    parent.mkdir()
    parent.chmod(0o755)
    with pytest.raises(PermissionError, match="chmod 700"):
        NodeDirectory(str(parent))
    assert list(parent.iterdir()) == []


def test_another_users_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = tmp_path / "theirs"
    parent.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: parent.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="another user"):
        NodeDirectory(str(parent))


def test_file_instead_of_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        NodeDirectory(str(tmp_path / "file"))


def test_leftovers_of_dead_processes_are_removed_and_live_files_kept(
    tmp_path: Path,
) -> None:
    parent = tmp_path / "node"
    dead, living = Holder(parent), Holder(parent)
    try:
        dead.kill()
        assert (dead.path / "socket").exists()
        with NodeDirectory(str(parent)):
            assert not dead.path.exists()
            assert (living.path / "socket").exists()
    finally:
        living.kill()


def test_shared_files_removed_by_cleaner_are_restored(tmp_path: Path) -> None:
    with NodeDirectory(str(tmp_path / "node")) as node:
        rows = node.share("admission/rows")
        rows.write_bytes(b"before")
        assert not node.keep()
        with rows.open("r+b") as mapped:
            shutil.rmtree(node.path)
            assert node.keep()
            mapped.write(b"after!")
        assert rows.read_bytes() == b"after!"
        rows.unlink()
        assert node.keep()
        assert rows.read_bytes() == b"after!"
        assert not node.keep()
    assert not node.path.exists()


def test_a_recreated_directory_is_locked_again(tmp_path: Path) -> None:
    with NodeDirectory(str(tmp_path / "node")) as node:
        shutil.rmtree(node.path)
        node.keep()
        with NodeDirectory(str(tmp_path / "node")) as neighbour:
            assert node.path.exists()
            assert neighbour.path != node.path


def test_replaced_directory_is_not_used(tmp_path: Path) -> None:
    with NodeDirectory(str(tmp_path / "node")) as node:
        shutil.rmtree(node.path)
        node.path.mkdir()
        node.path.chmod(0o777)
        with pytest.raises(PermissionError):
            node.keep()
        node.path.chmod(0o700)
        node.keep()


def test_directory_that_is_still_written_while_it_is_removed_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = Holder(tmp_path)
    dead.kill()

    def leave_a_late_file(directory: Path, ignore_errors: bool) -> None:
        (directory / ".swell").unlink()

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", leave_a_late_file)
        NodeDirectory(str(tmp_path))
    assert dead.path.exists()
    NodeDirectory(str(tmp_path)).close()
    assert not dead.path.exists()
