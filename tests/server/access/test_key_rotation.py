"""Rotation of key files while a front end serves."""

import logging
import os
from pathlib import Path

import pytest

from server.access.guards import CHECK_INTERVAL, PathAccess
from server.config import GuardConfig


class Rotation:
    """PathAccess with keys in files and a controlled clock."""

    def __init__(self, directory: Path) -> None:
        self._now = 0.0
        self.api, self.admin = directory / "api", directory / "admin"
        self.api.write_text("first\n")
        self.admin.write_text("root\n")
        self.path_access = PathAccess(
            GuardConfig(api_key_file=str(self.api), admin_key_file=str(self.admin))
        )

    def pass_time(self, seconds: float) -> None:
        self._now += seconds
        self.path_access.reload_if_changed(self._now)

    def opens(self, secret: str, path: str = "/v1/models") -> bool:
        headers = [(b"authorization", f"Bearer {secret}".encode())]
        return self.path_access.refusal({"type": "http", "path": path, "headers": headers}) is None


@pytest.fixture
def rotation(tmp_path: Path) -> Rotation:
    return Rotation(tmp_path)


def test_key_removed_from_file_is_refused(rotation: Rotation) -> None:
    rotation.pass_time(0)
    rotation.api.write_text("team: second\nfirst\n")
    rotation.pass_time(CHECK_INTERVAL)
    assert rotation.opens("first")
    assert rotation.opens("second")
    assert rotation.path_access.api.num_tenants == 2
    rotation.api.write_text("team: second\n")
    rotation.pass_time(CHECK_INTERVAL)
    assert not rotation.opens("first")
    assert rotation.opens("second")
    rotation.admin.write_text("other-root\n")
    rotation.pass_time(CHECK_INTERVAL)
    assert not rotation.opens("root", "/admin/scale")
    assert rotation.opens("other-root", "/admin/scale")


def test_key_files_are_checked_periodically_and_not_per_request(rotation: Rotation) -> None:
    rotation.pass_time(CHECK_INTERVAL)
    rotation.api.write_text("second\n")
    rotation.pass_time(CHECK_INTERVAL / 2)
    assert rotation.opens("first")
    rotation.pass_time(CHECK_INTERVAL)
    assert not rotation.opens("first")


@pytest.mark.parametrize("emptied", ["", "\n\n", "# none left\n"])
def test_last_key_removed_from_file_is_refused(rotation: Rotation, emptied: str) -> None:
    """The file may be in the middle of a write, so it must be empty in two consecutive reads."""
    for file, path in ((rotation.api, "/v1/models"), (rotation.admin, "/admin/scale")):
        secret = file.read_text().strip()
        file.write_text(emptied)
        rotation.pass_time(CHECK_INTERVAL)
        assert rotation.opens(secret, path)
        rotation.pass_time(CHECK_INTERVAL)
        for each in (secret, "", "anything"):
            assert not rotation.opens(each, path)
        file.write_text("second\n")
        rotation.pass_time(CHECK_INTERVAL)
        assert rotation.opens("second", path)


def test_unreadable_key_file_changes_nothing(
    rotation: Rotation, caplog: pytest.LogCaptureFixture
) -> None:
    rotation.api.unlink()
    rotation.pass_time(CHECK_INTERVAL)
    rotation.pass_time(CHECK_INTERVAL)
    assert rotation.opens("first")
    assert not rotation.opens("")
    assert not rotation.opens("anything")
    assert [each.levelno for each in caplog.records] == [logging.ERROR]
    rotation.api.write_text("second\n")
    rotation.pass_time(CHECK_INTERVAL)
    assert not rotation.opens("first")
    assert rotation.opens("second")


def test_changed_link_target_is_detected(tmp_path: Path) -> None:
    """The kubelet replaces the files of a secret volume by switching a symlink."""
    for version in ("one", "two"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "api-keys").write_text(f"key-{version}\n")
    (tmp_path / "data").symlink_to("one")
    doors = PathAccess(GuardConfig(api_key_file=str(tmp_path / "data" / "api-keys")))
    (tmp_path / "next").symlink_to("two")
    os.replace(tmp_path / "next", tmp_path / "data")
    doors.reload_if_changed(CHECK_INTERVAL)
    assert b"key-two" in doors.api
    assert b"key-one" not in doors.api
