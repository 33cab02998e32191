"""The output of `swell doctor` for a machine."""

import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.shared.config import ModelConfig
from server import doctor as command
from server.config import GuardConfig, ServeConfig, StoreConfig
from server.config.display import changed_settings
from server.config.tools import DoctorConfig, DoctorTarget
from server.doctor import Check, doctor, examine


def checks(target: DoctorTarget, describe: Callable[[], str] = lambda: "amx") -> dict[str, Check]:
    return {check.name: check for check in examine(target, describe)}


def test_port_in_use_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = DoctorConfig(doctor=DoctorTarget(port=port))
        assert doctor(config, lambda: "amx") == 1
    printed = capsys.readouterr().out
    assert f"127.0.0.1 port {port} is not free" in printed
    assert "failed: 1" in printed


def test_port_on_all_addresses_is_checked() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    assert checks(DoctorTarget(host="*", port=port))["port"].verdict == "ok"


def test_scarce_resources_are_warnings_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    monkeypatch.setattr(command, "MIN_SHM", 1 << 60)
    monkeypatch.setattr(command, "MIN_MEMORY", 1 << 60)
    monkeypatch.setattr(command, "_ENGINE", ("torch", "no-such-package"))
    monkeypatch.setattr(command, "_FALLBACK", ("no-such-package",))
    found = checks(DoctorTarget())
    for name, advice in (
        ("file descriptors", "ulimit -Hn"),
        ("/dev/shm", "--shm-size"),
        ("memory", "GiB available"),
        ("packages of engines", "missing no-such-package: they need swell[engine]"),
    ):
        assert found[name].verdict == "warn", found[name]
        assert advice in found[name].text
    optional = found["optional packages"]
    assert optional.verdict == "ok", "most models do not need it"
    assert "missing no-such-package: only models that are not built in need it" in optional.text


def test_missing_torch_in_container_is_no_failure() -> None:
    def without_torch() -> str:
        raise ImportError("torch")

    def wrong() -> str:
        raise ValueError("SWELL_PROCESSOR=z80: must be one of amx")

    assert checks(DoctorTarget(), without_torch)["processor"].verdict == "warn"
    failed = checks(DoctorTarget(), wrong)["processor"]
    assert failed.verdict == "fail"
    assert "z80" in failed.text


def test_unwritable_cache_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "models"))
    assert checks(DoctorTarget())["cache of models"].verdict == "ok"
    monkeypatch.setattr("os.access", lambda *_: False)
    assert "set HF_HOME" in checks(DoctorTarget())["cache of models"].text


@pytest.mark.parametrize("name", ["", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE"])
def test_checked_cache_is_used_for_fetching(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for each in ("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    if name:
        monkeypatch.setenv(name, str(tmp_path / "there"))
    program = "from huggingface_hub.constants import HF_HUB_CACHE as found; print(found)"
    found = subprocess.check_output([sys.executable, "-c", program], text=True).strip()
    assert checks(DoctorTarget())["cache of models"].text.startswith(f"{found}, ")


def test_start_line_lists_changed_settings_without_secrets() -> None:
    config = ServeConfig(
        model=ModelConfig(max_model_len=77),
        guards=GuardConfig(api_key=("s3cret",), admin_key="s3cret", api_key_file="/run/keys"),
    )
    line = changed_settings(config)
    assert "max_model_len=77" in line
    assert "api_key_file='/run/keys'" in line
    assert "admin_key='(hidden)'" in line
    assert "s3cret" not in line
    assert changed_settings(ServeConfig(store=StoreConfig())) == "all defaults"
