"""The parts of the check of a GPU machine, in miniature on a processor."""

import argparse
import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import (
    PAGE_HEAD,
    PARTS,
    SMALL,
    Setup,
    agreement,
    operations_per_token,
    page,
)
from engine.models.hf_config import read_spec

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return Setup("cpu", True, tmp_path)


def test_page_lists_all_findings() -> None:
    assert (DOCS / "gpu-check.md").read_text().startswith(PAGE_HEAD)
    found = {
        "machine": {"device": "H100"},
        "decode": {"batches": {"16": {"of_bound": 0.8125, "step_ms": 12.5}}},
        "served": {"error": "it | broke\nthere"},
        "tests": {"list": [1, 2]},
    }
    text = page(found)
    assert text.startswith(PAGE_HEAD)
    assert "| decode | batches 16 of bound | 0.8125 |" in text
    assert "| served | error | it / broke there |" in text


def test_count_of_agreeing_tokens_stops_at_first_difference() -> None:
    assert agreement([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == pytest.approx(4 / 6)


def test_step_time_is_compared_with_lower_bound_of_model(setup: Setup) -> None:
    spec = read_spec(setup.directory)
    attention = 128 * (2 * 4 * 32 + 2 * 2 * 32)
    assert operations_per_token(spec) == 2 * 2 * (attention + 3 * 128 * 256)
    decoded = PARTS["decode"][0](setup)
    assert sorted(decoded["batches"]) == ["1", "4"]
    assert all(row["of_bound"] > 0 for row in decoded["batches"].values())
    assert PARTS["prefill"][0](setup)["of_bound"] > 0


def test_failed_or_late_part_does_not_stop_others(setup: Setup) -> None:
    options = argparse.Namespace(device="cpu", small=True, logs=None)
    assert gpu_check.run_part("served", options, setup.directory, 0) == {
        "error": "no time was left"
    }
    (setup.directory / "config.json").write_text("{}")
    assert "error" in gpu_check.run_part("decode", options, setup.directory, 300)


def test_files_with_cuda_tests_are_found_and_the_machine_is_named() -> None:
    names = {Path(path).name for path in gpu_check.files_of_cuda_tests()}
    assert {"test_cuda.py", "test_masked_sampling.py"} <= names
    assert gpu_check.machine("cpu")["torch"] == torch.__version__
