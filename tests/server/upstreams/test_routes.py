"""Files that map models to other servers."""

from pathlib import Path

import pytest

from server.upstreams import routes
from server.upstreams.routes import MAX_FILE_BYTES, MAX_ROUTES, BadModelRoutes, ModelRoutes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("# none yet\n", {}),
        ("org/b: http://b:8000/\n", {"org/b": "http://b:8000"}),
        ('{"b": "https://[::1]:8000/swell"}', {"b": "https://[::1]:8000/swell"}),
    ],
)
def test_routes_are_read_from_a_file(tmp_path: Path, text: str, expected: dict[str, str]) -> None:
    path = tmp_path / "routes.yaml"
    path.write_text(text)
    assert routes.read_routes(path) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("b", "cannot be used"),
        ("- b: http://b", "cannot be used"),
        ("b: 7", "cannot be used"),
        ("b: {url: http://b}", "cannot be used"),
        ("'': http://b", "cannot be used"),
        ("b: [", "cannot be used"),
        ("[" * 5_000, "cannot be used"),
        ("b: !!python/object/apply:os.system ['true']", "cannot be used"),
        ("b: b:8000", "b needs the URL of a server"),
        ("b: ftp://b", "b needs the URL of a server"),
        ("b: http://user:secret@b", "b needs the URL of a server"),
        ("b: http://b?x=1", "b needs the URL of a server"),
        ("b: http://", "b needs the URL of a server"),
        ("\n".join(f"m{i}: http://b" for i in range(MAX_ROUTES + 1)), "more than"),
        ("#" * (MAX_FILE_BYTES + 1), "larger than"),
    ],
)
def test_invalid_list_of_servers_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "routes.yaml"
    path.write_text(text)
    with pytest.raises(BadModelRoutes, match=why):
        ModelRoutes(str(path))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadModelRoutes, match=r"--model-routes .*missing"):
        ModelRoutes(str(tmp_path / "missing"))


def test_routes_follow_the_file_and_invalid_files_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(routes, "CHECK_INTERVAL", 0.0)
    path = tmp_path / "routes.yaml"
    path.write_text("b: http://b\n")
    known = ModelRoutes(str(path))
    path.write_text("b: http://b\nlonger: http://c\n")
    assert known.current() == {"b": "http://b", "longer": "http://c"}
    path.write_text("b: nonsense of another length\n")
    assert known.current() == {"b": "http://b", "longer": "http://c"}
    assert "keeping the old model routes" in caplog.text
    path.unlink()
    assert known.current() == {"b": "http://b", "longer": "http://c"}
    path.write_text("")
    assert known.current() == {}
