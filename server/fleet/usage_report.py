"""The report that `--usage-report` writes to a local file. Nothing is sent anywhere."""

import json
import logging
import os
import platform
import time
from pathlib import Path
from typing import Any

import msgspec

from engine.shared.config import Section
from engine.shared.cpu.machine import usable_cores
from engine.shared.devices import num_cuda_devices
from engine.shared.settings import changes_of
from engine.shared.version import PROTOCOL_VERSION, SWELL_VERSION
from engine.shared.writable import writable_file
from server.config import ServeConfig

logger = logging.getLogger(__name__)


class UsageReport(msgspec.Struct):
    """What was served on which machine; docs/deploy-reference.md describes the fields."""

    version: str
    protocol: int
    python: str
    system: str
    cores: int
    memory_bytes: int
    cuda_devices: int
    architecture: str | None
    settings: dict[str, Any]
    started_at: int
    ended_at: int | None = None
    exit_code: int | None = None


def begin_usage_report(config: ServeConfig, model: Path) -> UsageReport | None:
    """Write the report at startup, if configured; `model` is the model's directory.

    Raises:
        OSError: it cannot be written.
    """
    path = config.supervisor.usage_report
    if path is None:
        return None
    described = json.loads((model / "config.json").read_bytes())
    report = UsageReport(
        version=SWELL_VERSION,
        protocol=PROTOCOL_VERSION,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cores=usable_cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        cuda_devices=num_cuda_devices(),
        architecture=next(iter(described.get("architectures") or []), None),
        settings=_settings(config),
        started_at=int(time.time()),
    )
    _write(report, path)
    return report


def end_usage_report(config: ServeConfig, report: UsageReport | None, code: int) -> None:
    """Add the end time and exit code to the report, if there is one."""
    path = config.supervisor.usage_report
    if report is None or path is None:
        return
    report.ended_at, report.exit_code = int(time.time()), code
    try:
        _write(report, path)
    except OSError as error:
        logger.warning("--usage-report: %s", error)


def _settings(config: Section) -> dict[str, Any]:
    """Return the settings that differ from their defaults; free text is replaced by true."""
    found = {}
    for setting, value in changes_of(config):
        is_plain = isinstance(value, bool | int | float | None) or value in setting.choices
        found[setting.name] = value if is_plain else True
    return found


def _write(report: UsageReport, path: str) -> None:
    writable_file(path).write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
