"""A Docker engine for tests: the machine's, or one started and stopped here.

No image registry is needed: the base image is built from Debian packages, and pip installs from
a folder of wheels.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from server.fleet.local_server import stop_process

ROOT = Path(__file__).parent.parent.parent
BASE_IMAGE = "swell-test-base:bookworm"
PROMETHEUS_IMAGE = "swell-test-prometheus:local"
START_TIMEOUT = 60.0

_PACKAGES = "python3,python3-venv,ca-certificates"
_NOT_NEEDED = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man",
               "usr/share/locale", "usr/share/info")  # fmt: skip


class NoDocker(Exception):
    """This machine cannot run containers; the message says what is missing."""


class Docker:
    """Runs commands against one engine."""

    def __init__(
        self,
        host: str | None,
        process: "subprocess.Popen[bytes] | None" = None,
        firewall: bytes | None = None,
    ) -> None:
        # Debian's client has BuildKit built in; others may need a plugin for it.
        path = f"/usr/bin:/usr/sbin:/sbin:{os.environ['PATH']}"
        self.environment = {
            **os.environ,
            "PATH": path,
            "DOCKER_BUILDKIT": "1",
            "COMPOSE_DOCKER_CLI_BUILD": "1",
        }
        if host is not None:
            self.environment["DOCKER_HOST"] = host
        self._process = process
        self._firewall = firewall

    def run(
        self, *command: str, timeout: float = 120.0, **more: str
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command with the engine's environment; return the result for any exit code."""
        return subprocess.run(
            command,
            env={**self.environment, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )

    def output(self, *command: str, timeout: float = 120.0, **more: str) -> str:
        """Run a command, which must succeed; return its output."""
        done = self.run(*command, timeout=timeout, **more)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}"
        return done.stdout

    def inspect(self, name: str, form: str) -> str:
        """Inspect a container or image with a Go template."""
        return self.output("docker", "inspect", "-f", form, name).strip()

    def has_image(self, tag: str) -> bool:
        """Return whether an image exists."""
        return self.run("docker", "image", "inspect", tag).returncode == 0

    def close(self) -> None:
        """Stop the engine and its containers, if it was started here."""
        if self._process is not None:
            stop_process(self._process, 60)
            # Rules and bridge are shared by all engines of a machine.
            if self._firewall is not None and not _engine_runs():
                subprocess.run(["iptables-restore"], input=self._firewall, check=False)
                subprocess.run(["ip", "link", "del", "docker0"], capture_output=True, check=False)


def _engine_runs() -> bool:
    for name in Path("/proc").glob("[0-9]*/comm"):
        try:
            if name.read_text().strip() == "dockerd":
                return True
        except OSError:  # the process has exited
            continue
    return False


def find_or_start(directory: Path) -> Docker:
    """Return a working engine, starting one with its data in `directory` if necessary.

    Raises:
        NoDocker: no engine is running and none can be started.
    """
    for program in ("docker", "docker-compose", "debootstrap", "prometheus", "iptables-save"):
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
            raise NoDocker(f"{program} is not installed (Debian: docker.io docker-compose "
                           "debootstrap prometheus iptables)")  # fmt: skip
    if os.geteuid() != 0:
        raise NoDocker("making a base image with debootstrap needs root")
    running = Docker(None)
    if running.run("docker", "info").returncode == 0:
        return running
    daemon = shutil.which("dockerd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if daemon is None:
        raise NoDocker("no Docker engine answers and dockerd is not installed")
    host = f"unix://{directory}/docker.sock"
    log = directory / "dockerd.log"
    before = subprocess.run(["iptables-save"], capture_output=True, check=False)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [daemon, "-H", host, "--data-root", str(directory / "data"), "--exec-root",
             str(directory / "exec"), "--pidfile", str(directory / "dockerd.pid")],
            env={**os.environ, "PATH": f"/usr/sbin:/usr/bin:/sbin:{os.environ['PATH']}"},
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    docker = Docker(host, process, before.stdout if before.returncode == 0 else None)
    deadline = time.monotonic() + START_TIMEOUT
    while docker.run("docker", "info").returncode != 0:
        if process.poll() is not None or time.monotonic() > deadline:
            docker.close()
            last = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
            raise NoDocker(f"dockerd does not start here:\n{last}")
        time.sleep(0.2)
    return docker


def make_base_image(docker: Docker, directory: Path) -> None:
    """Build BASE_IMAGE (Debian with Python and this machine's certificates) unless it exists."""
    if docker.has_image(BASE_IMAGE):
        return
    root = directory / "rootfs"
    done = docker.run(
        "debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(root),
        timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    for folder in _NOT_NEEDED:
        shutil.rmtree(root / folder, ignore_errors=True)
        (root / folder).mkdir(parents=True)
    certificates = Path("/etc/ssl/certs/ca-certificates.crt")
    if certificates.is_file():
        shutil.copy(certificates, root / "etc/ssl/certs/ca-certificates.crt")
    archive = directory / "rootfs.tar"
    docker.output("tar", "-C", str(root), "-cf", str(archive), ".")
    shutil.rmtree(root, ignore_errors=True)
    docker.output("docker", "import", str(archive), BASE_IMAGE, timeout=200)
    archive.unlink()


def make_prometheus_image(docker: Docker) -> None:
    """Build PROMETHEUS_IMAGE from Debian's package, as a substitute for the official image."""
    if docker.has_image(PROMETHEUS_IMAGE):
        return
    binary = shutil.which("prometheus")
    assert binary is not None
    with tempfile.TemporaryDirectory() as context:
        shutil.copy(binary, Path(context, "prometheus"))
        Path(context, "Dockerfile").write_text(
            f"FROM {BASE_IMAGE}\n"
            "COPY prometheus /bin/prometheus\n"
            "RUN install -d -o 65534 -g 65534 /prometheus\n"
            "USER 65534\n"
            'ENTRYPOINT ["/bin/prometheus"]\n'
        )
        docker.output("docker", "build", "-q", "-t", PROMETHEUS_IMAGE, context, timeout=120)


def clean_checkout(target: Path) -> None:
    """Copy all files that are tracked or not ignored by git."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True,
    ).stdout.decode()  # fmt: skip
    for name in filter(None, listed.split("\0")):
        source = ROOT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target / name)


def fill_wheelhouse(checkout: Path) -> None:
    """Put the wheels of all images into docker/wheels of a checkout."""
    wheels = checkout / "docker" / "wheels"
    wheels.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "-d", str(wheels), "-c", "constraints.txt",
         "--disable-pip-version-check", ".[server,otel,postgres,engine,compiled,ray]",
         "ray[default]", "setuptools>=77", "wheel"],
        cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
