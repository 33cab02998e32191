"""`swell doctor`: checks of a machine, each with a verdict."""

import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

from engine.shared.addresses import listen
from engine.shared.cpu.machine import cpu_quota, read_topology, usable_cores
from engine.shared.devices import num_cuda_devices
from engine.shared.version import PROTOCOL_VERSION, SWELL_VERSION
from server.config.tools import DoctorConfig, DoctorTarget

Verdict = Literal["ok", "warn", "fail"]

_GIB = 1 << 30
MIN_MEMORY = 2 * _GIB
"""Bytes needed by a small model, its engine and an API server."""
MIN_TMP = _GIB
MIN_SHM = 64 << 20
"""Default size of /dev/shm in containers; the shared tables of a node need less."""
MIN_DESCRIPTORS = 4096
"""Too few below this for about a hundred connections and a few engines."""

_NEEDED = ("msgspec", "pyzmq")
_SERVER = ("fastapi", "pydantic", "tokenizers")
_ENGINE = ("torch", "numba", "safetensors")
_FALLBACK = ("transformers",)


class Check(NamedTuple):
    """One line of the report."""

    name: str
    verdict: Verdict
    text: str


def doctor(config: DoctorConfig, describe_processor: Callable[[], str]) -> int:
    """Print the report; return 1 if a check fails.

    Args:
        describe_processor: returns which kernels this processor gets; ImportError without torch.
    """
    checks = list(examine(config.doctor, describe_processor))
    width = max(len(check.name) for check in checks)
    for check in checks:
        print(f"{check.verdict:4}  {check.name:{width}}  {check.text}")
    counts = {each: sum(check.verdict == each for check in checks) for each in ("fail", "warn")}
    print(f"failed: {counts['fail']}, warnings: {counts['warn']}")
    return 1 if counts["fail"] else 0


def examine(target: DoctorTarget, describe_processor: Callable[[], str]) -> Iterator[Check]:
    """Yield the results of all checks, one at a time."""
    yield Check("swell", "ok", f"{SWELL_VERSION}, protocol {PROTOCOL_VERSION}")
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    text = f"{platform.python_version()} at {sys.executable}, {system}"
    yield Check("python", "ok" if sys.platform == "linux" else "fail", text)
    yield _packages("packages", _NEEDED, "fail", "install swell again")
    yield _packages("packages of API servers", _SERVER, "warn", "they need swell[server]")
    yield _packages("packages of engines", _ENGINE, "warn", "they need swell[engine]")
    fallback = "only models that are not built in need it (swell[transformers])"
    yield _packages("optional packages", _FALLBACK, "ok", fallback)
    yield _processor(describe_processor)
    yield _cores()
    yield _devices()
    yield _memory(Path("/"))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or hard >= MIN_DESCRIPTORS:
        yield Check("file descriptors", "ok", f"{hard} per process")
    else:
        text = f"{hard} per process: raise the hard limit (ulimit -Hn, LimitNOFILE=)"
        yield Check("file descriptors", "warn", text)
    yield _room("/dev/shm", Path("/dev/shm"), MIN_SHM, "docker run --shm-size, or emptyDir")
    yield _room("temporary files", Path(tempfile.gettempdir()), MIN_TMP, "set TMPDIR")
    yield _cache()
    yield _port(target)


def _packages(name: str, packages: tuple[str, ...], lacking: Verdict, advice: str) -> Check:
    found, missing = [], []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    text = ", ".join(found)
    if missing:
        return Check(name, lacking, f"{text}; missing {', '.join(missing)}: {advice}".lstrip("; "))
    return Check(name, "ok", text)


def _processor(describe: Callable[[], str]) -> Check:
    try:
        return Check("processor", "ok", describe())
    except ImportError:
        return Check("processor", "warn", "not known without torch")
    except Exception as error:
        return Check("processor", "fail", f"{type(error).__name__}: {error}")


def _cores() -> Check:
    cores, quota, topology = usable_cores(), cpu_quota(), read_topology()
    text = f"{cores} cores, {len(os.sched_getaffinity(0))} hardware threads"
    if topology is None:
        text += ", topology not readable"
    if quota is not None:
        text += f", a quota of {quota:g} CPUs"
    few = min(cores, quota or cores) < 2
    text += ": engines and API servers share one" if few else ""
    return Check("cores", "warn" if few else "ok", text)


def _devices() -> Check:
    nodes, usable = len(list(Path("/dev").glob("nvidia[0-9]*"))), num_cuda_devices()
    if nodes and not usable:
        return Check(
            "devices", "warn",
            f"{nodes} CUDA devices that engines do not see: torch is made for CPUs, or "
            "CUDA_VISIBLE_DEVICES hides them",
        )  # fmt: skip
    return Check("devices", "ok", f"{usable} CUDA devices" if usable else "CPUs only")


def _memory(root: Path) -> Check:
    fields = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024
    total, free = fields["MemTotal"], fields["MemAvailable"]
    text = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB available"
    try:
        limit = (root / "sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        limit = "max"
    if limit.isdecimal():
        free = min(free, int(limit))
        text += f", the container may have {int(limit) / _GIB:.1f} GiB"
    return Check("memory", "ok" if free >= MIN_MEMORY else "warn", text)


def _room(name: str, directory: Path, least: int, advice: str) -> Check:
    if not os.access(directory, os.W_OK):
        return Check(name, "fail", f"{directory} cannot be written to: {advice}")
    free = shutil.disk_usage(directory).free
    text = f"{free / _GIB:.1f} GiB free in {directory}"
    return Check(name, "ok", text) if free >= least else Check(name, "warn", f"{text}: {advice}")


def _cache() -> Check:
    # Same lookup as in huggingface_hub, which coordinator installations lack.
    caches = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    home = os.environ.get("HF_HOME") or f"{caches}/huggingface"
    home = os.environ.get("HF_HUB_CACHE") or f"{home}/hub"
    there = Path(home)
    while not there.exists():
        there = there.parent
    if os.access(there, os.W_OK):
        free = shutil.disk_usage(there).free
        return Check("cache of models", "ok", f"{home}, {free / _GIB:.1f} GiB free")
    return Check("cache of models", "warn", f"{home} cannot be written to: set HF_HOME")


def _port(target: DoctorTarget) -> Check:
    where = f"{target.host} port {target.port}"
    try:
        listen(target.host, target.port, 1).close()
    except OSError as error:
        return Check("port", "fail", f"{where} is not free: {error.strerror or error}")
    return Check("port", "ok", f"{where} is free")
