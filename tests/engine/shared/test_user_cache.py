"""The directory of regenerable files."""

import os
import pwd
import tempfile
from pathlib import Path

import pytest

from engine.shared.user_cache import user_cache


@pytest.fixture
def no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of temporary files of a user without a home, as containers have."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


def test_a_user_without_a_home_has_a_private_cache(no_home: Path) -> None:
    found = user_cache()
    assert found.parent == no_home
    assert found.stat().st_mode & 0o777 == 0o700
    assert user_cache() == found


def test_directory_of_other_user_is_no_cache(
    no_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = os.geteuid() + 1
    (no_home / f"swell-cache-{uid}").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    with pytest.raises(PermissionError, match="another user"):
        user_cache()
