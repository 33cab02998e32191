"""A sequence that was begun in another engine goes on in a vLLM engine as if it never had moved."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from engine.shared.config import BUNDLED_MODEL
from tests.vllm.stacks import ENVIRONMENT, GRAMMARS, PYTHON, ROOT, SCHEMA, prompts

pytestmark = pytest.mark.vllm

PLACES = [1, 2, 17, 59]


def test_tokens_generated_elsewhere_count_as_output(tmp_path: Path) -> None:
    wanted = {
        "model": str(BUNDLED_MODEL), "engine_args": json.dumps(GRAMMARS), "prompt": prompts(1)[0],
        "schema": SCHEMA, "tokens": 60, "places": PLACES,
    }  # fmt: skip
    results = tmp_path / "results.json"
    subprocess.run(
        [PYTHON, Path(__file__).with_name("moves.py"), results], cwd=ROOT,
        input=json.dumps(wanted), text=True, check=True, timeout=600,
        env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    answers = json.loads(results.read_text())
    told = answers.pop("told")
    plain = answers.pop("plain")[0]
    assert told == {
        "prompt": wanted["prompt"], "output": plain[:40], "max_tokens": 60,
        "presence_penalty": 1.0,
    }  # fmt: skip
    for name, (whole, *continued) in answers.items():
        assert whole != plain, f"{name} has an effect"
        assert len(continued) == len([place for place in PLACES if place < len(whole)]) > 1
        assert continued == [whole] * len(continued), name
