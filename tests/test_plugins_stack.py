"""Packages that add to a stack: the example of docs/plugins.md, others, and broken ones."""

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.running_stack import RunningStack
from engine.shared.config import BUNDLED_MODEL
from tests.support.commands import run_swell
from tests.support.http import call, completion
from tests.support.metrics import scrape
from tests.support.plugins import offer

pytestmark = pytest.mark.stack
ANEW = pytest.mark.usefixtures("started_anew")

DOCUMENT = Path(__file__).parents[1] / "docs" / "plugins.md"
MORE = '''
"""A family, an engine and what fails."""

import msgspec

from engine.core.engine_core import EngineCore
from engine.executor.simulated import SimulatedExecutor
from engine.models.families import qwen


class Simulated(EngineCore):
    def __init__(self, config, *, rank, incarnation, clock, on_failure, weight_version=""):
        if config.model.quantization is not None:
            raise ValueError("--quantization: engines of tests have none")
        self._executor = SimulatedExecutor(config, vocab_size=2048)
        super().__init__(config, self._executor, rank=rank, incarnation=incarnation, clock=clock)

    def shutdown(self):
        self._executor.shutdown()


class Partial:
    def __init__(self, config, **_):
        pass


PLAYS = msgspec.structs.replace(
    qwen.QWEN_3_MOE, architectures=("PlaysForCausalLM",), reads_as="Qwen3MoeForCausalLM"
)


def fails(*_):
    raise RuntimeError("it has its reasons")
'''
TOOL = {
    "type": "function",
    "function": {
        "name": "set_light",
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for installed packages, with the wheel of the documented example and others."""
    sources, site = tmp_path_factory.mktemp("example"), tmp_path_factory.mktemp("site")
    blocks = re.findall(r"```(toml|python)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    files = {"toml": "pyproject.toml", "python": "swell_example.py"}
    assert [kind for kind, _ in blocks] == list(files), "the example is one file of each"
    for kind, text in blocks:
        (sources / files[kind]).write_text(text)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
         "--no-index", "--disable-pip-version-check", "-w", str(sources), str(sources)],
        check=True, timeout=300,
    )  # fmt: skip
    (wheel,) = sources.glob("swell_example-1.0-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "more_plugins.py").write_text(MORE)
    offer(site, "swell.model_families", PlaysForCausalLM="more_plugins:PLAYS")
    offer(site, "swell.engine_backends", simulating="more_plugins:Simulated")
    offer(site, "swell.engine_backends", partial="more_plugins:Partial")
    offer(site, "swell.routing_policies", failing="more_plugins:fails")
    offer(site, "swell.admission_policies", unsure="more_plugins:fails")
    return site


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The bundled model, as one of an architecture that only a plugin knows."""
    directory = tmp_path / "plays"
    directory.mkdir()
    for each in BUNDLED_MODEL.iterdir():
        (directory / each.name).symlink_to(each)
    config = json.loads((BUNDLED_MODEL / "config.json").read_text())
    (directory / "config.json").unlink()
    config = {**config, "architectures": ["PlaysForCausalLM"], "model_type": "plays"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@ANEW
def test_the_documented_example_routes_and_reads_calls_and_a_family_serves(
    site: Path, model: Path
) -> None:
    with RunningStack(
        str(model), "--data-parallel-size", "2", "--min-ready-engines", "2",
        "--api-server-count", "1", "--routing-policy", "fill-first",
        "--tool-call-parser", "call-tags", timeout=400, environment={"PYTHONPATH": str(site)},
    ) as stack:  # fmt: skip
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": "Let there be light."}],
            "tools": [TOOL], "max_tokens": 200,
        }  # fmt: skip
        answer = call(f"{stack.url}/v1/chat/completions", {**body, "tool_choice": "required"})
        [made, *_] = answer["choices"][0]["message"]["tool_calls"]
        assert made["function"]["name"] == "set_light"
        assert set(json.loads(made["function"]["arguments"])) == {"on"}
        reasons = re.findall(r'routing_decisions_total\{engine="(\d+)".*?,reason="(\w+)"\} ([1-9])',
                             scrape(stack.url))  # fmt: skip
        assert reasons == [("0", "fill_first", "1")], "the first engine, by the policy's reason"


def test_plugin_engine_serves(site: Path) -> None:
    with RunningStack(
        "--engine-backend", "simulating", "--data-parallel-size", "2",
        "--api-server-count", "1", environment={"PYTHONPATH": str(site)},
    ) as stack:  # fmt: skip
        answer = call(f"{stack.url}/v1/completions", completion("To be", 7, ignore_eos=True))
        assert answer["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--routing-policy", "failing"), "--routing-policy failing: the plugin more_plugins:fails"
         " of offers-failing 2.5 cannot be used: RuntimeError: it has its reasons"),
        (("--admission-policy", "unsure", "--executor", "simulated"),
         "--admission-policy unsure: .*RuntimeError: it has"),
        (("--engine-backend", "simulating", "--quantization", "int8"),
         "--engine-backend simulating: .*--quantization: engines of tests have none"),
        (("--engine-backend", "partial"),
         "--engine-backend partial: .*it has no handle, .*shutdown, stats, step"),
    ],
    ids=["routing", "admission", "backend", "partial backend"],
)  # fmt: skip
def test_a_plugin_that_fails_ends_the_start_with_its_name_and_the_reason(
    site: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], told: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(site))
    ended = run_swell("serve", "--port", "0", "--data-parallel-size", "1", *flags)
    assert ended.returncode not in (0, -9)
    assert re.search(told, ended.stdout + ended.stderr), ended.stdout + ended.stderr
