"""Models are downloaded before they are served, from a hub simulated by a local server."""

import hashlib
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub.utils.tqdm import enable_progress_bars

from engine.shared import model_files
from tests.support.commands import SWELL

pytestmark = pytest.mark.slow

COMMIT = "a" * 40
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": bytes(5000),
    "train.bin": b"not wanted",
    "original/model.safetensors": b"the same for another program",
    "name-Q4_K_M.gguf": b"GGUF",
    "name-Q8_0.gguf": b"GGUF of another size",
}
WANTED = {"config.json", "tokenizer.json", "model.safetensors"}


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


class _Hub(BaseHTTPRequestHandler):
    """Serves the hub client's requests for a repository."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        if path.startswith("/api/models/org/name/tree/"):
            tree = [
                {"type": "file", "path": each, "size": len(content), "oid": _oid(content)}
                for each, content in FILES.items()
            ]
            content = json.dumps(tree).encode()
        elif path.startswith("/api/models/org/name"):
            siblings = [{"rfilename": each} for each in FILES]
            content = json.dumps({"id": "org/name", "sha": COMMIT, "siblings": siblings}).encode()
        elif path == f"/org/name/resolve/{COMMIT}/{name}" and name in FILES:
            content = FILES[name]
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{_oid(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def fetch(cache: Path, endpoint: str, *flags: str) -> "subprocess.CompletedProcess[str]":
    env = os.environ | {
        "HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1",
    }  # fmt: skip
    return subprocess.run(
        [SWELL, *([] if flags[:1] == ("models",) else ["fetch"]), *flags],
        env=env, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def fetched(cache: Path) -> set[str]:
    return {file.name for file in cache.rglob("snapshots/*/*")}


def test_fetched_model_can_be_served(tmp_path: Path) -> None:
    with hub() as endpoint:
        text = fetch(tmp_path, endpoint, "org/name", "--text-only")
        assert text.returncode == 0, text.stderr
        assert fetched(tmp_path) == {"config.json", "tokenizer.json"}
        whole = fetch(tmp_path, endpoint, "org/name")
        assert whole.returncode == 0, whole.stderr
        assert "3 files" in whole.stderr
        assert fetched(tmp_path) == WANTED
    offline = fetch(tmp_path, endpoint, "org/name", "--revision", COMMIT)
    assert offline.returncode == 0, "what is pinned to a commit needs no hub"


def test_failed_fetch_is_reported_with_reason(tmp_path: Path) -> None:
    with hub() as endpoint:
        missing = fetch(tmp_path, endpoint, "org/other")
    assert missing.returncode == 1
    assert "'org/other' is not a directory and could not be fetched" in missing.stderr
    unnamed = fetch(tmp_path, endpoint)
    assert unnamed.returncode == 2
    assert "which model?" in unnamed.stderr


def test_one_gguf_file_of_a_repository_is_fetched_by_its_quantization(tmp_path: Path) -> None:
    with hub() as endpoint:
        found = fetch(tmp_path, endpoint, "org/name:q4_k_m")
        assert found.returncode == 0, found.stderr
        assert "name-Q4_K_M.gguf: 0.0 MB" in found.stderr
        assert fetched(tmp_path) == {"name-Q4_K_M.gguf"}
        other = fetch(tmp_path, endpoint, "org/name:Q2_K")
    assert other.returncode == 1
    assert "ends in Q2_K.gguf; it has: name-Q4_K_M.gguf, name-Q8_0.gguf" in other.stderr


def test_fetched_models_are_shown_and_removed(tmp_path: Path) -> None:
    with hub() as endpoint:
        empty = fetch(tmp_path, endpoint, "models")
        assert (empty.returncode, "no model has been fetched" in empty.stderr) == (0, True)
        assert fetch(tmp_path, endpoint, "org/name:Q8_0").returncode == 0
        shown = fetch(tmp_path, endpoint, "models")
        assert shown.returncode == 0, shown.stderr
        assert "org/name" in shown.stdout
        assert "name-Q8_0.gguf" in shown.stdout
        missing = fetch(tmp_path, endpoint, "models", "--remove", "org/other")
        assert (missing.returncode, "org/other is not in the cache" in missing.stderr) == (1, True)
        assert fetch(tmp_path, endpoint, "models", "--remove", "org/name").returncode == 0
    assert fetched(tmp_path) == set()


def test_download_progress_is_logged_without_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(model_files, "_SECONDS_PER_LINE", 0)
    enable_progress_bars()  # transformers disables those of the whole process for other tests
    with model_files.download_progress()(total=5000, unit="B", unit_scale=True) as shown:
        shown.update(2500)
    lines = capsys.readouterr().err.splitlines()
    assert any("50%" in line and "2.50k/5.00k" in line for line in lines)


def test_serve_exits_with_reason_if_model_is_unavailable(tmp_path: Path) -> None:
    with hub() as endpoint:
        env = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path)}
        served = subprocess.run(
            [SWELL, "serve", "org/other"],
            env=env, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert served.returncode == 1
    last = served.stderr.strip().splitlines()[-1]
    assert last.startswith("swell cannot start: model 'org/other' is not a directory")
