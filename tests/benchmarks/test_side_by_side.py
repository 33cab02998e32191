"""What the comparison says about the machine, and how results are kept."""

from pathlib import Path

import pytest

from benchmarks.side_by_side import keep
from benchmarks.versus import history
from benchmarks.versus.history import Processor, commit, processor_of, put_on_top
from benchmarks.versus.report import Results, Run

XEON = Processor("Some(R) Xeon(R) CPU, family 6, model 167", ("amx_bf16",))


def test_the_features_of_a_processor_are_named() -> None:
    intel = (
        "processor : 0\ncpu family : 6\nmodel : 167\nmodel name : Some Xeon\n"
        "flags : fpu avx2 amx_bf16 avx512f\n\n"
    )
    found = processor_of(intel + intel)
    assert found.summary == "Some Xeon, family 6, model 167 (amx_bf16, avx512f, avx2)"
    arm = "processor : 0\nFeatures : fp asimd bf16 sve2\nCPU part : 0xd4f\n"
    assert processor_of(arm).summary.endswith(", part 0xd4f (bf16, asimd)")


def test_a_processor_without_a_list_has_a_name_all_the_same() -> None:
    assert processor_of("").summary.endswith(" (none of the features looked for)")


def test_the_file_of_a_processor_is_named_after_it() -> None:
    assert XEON.file_name == "some-xeon-cpu-family-6-model-167.md"


def test_the_newest_comparison_is_on_top(tmp_path: Path) -> None:
    put_on_top(tmp_path, XEON, "Monday, commit a", "| 1 |")
    path = put_on_top(tmp_path, XEON, "Tuesday, commit b", "| 2 |")
    assert path.read_text().split("\n\n")[2:] == [
        "## Tuesday, commit b", "| 2 |", "## Monday, commit a", "| 1 |\n",
    ]  # fmt: skip
    assert path.read_text().startswith("# Some(R) Xeon(R) CPU, family 6, model 167\n\n")


def test_a_comparison_that_goes_on_replaces_its_earlier_state(tmp_path: Path) -> None:
    put_on_top(tmp_path, XEON, "Monday, commit a", "| 1 |")
    put_on_top(tmp_path, XEON, "Tuesday, commit b", "| 2 |")
    text = put_on_top(tmp_path, XEON, "Monday, commit a", "| 3 |").read_text()
    assert text.index("| 3 |") < text.index("| 2 |")
    assert "| 1 |" not in text


def test_results_are_kept_with_their_commit_and_rounds(tmp_path: Path) -> None:
    results = Results("2 cores Some Xeon", {"Swell": "1.0"}, "2026-11-24 03:00", "abc1234")
    keep(results, tmp_path)
    assert not list(tmp_path.iterdir())
    results.runs.append(Run("0.4b 16/128 x1", "Swell", 1, 0, 12.5, {}))
    keep(results, tmp_path)
    (path,) = tmp_path.iterdir()
    assert "## 2026-11-24 03:00 UTC, commit abc1234" in path.read_text()
    assert "2 cores Some Xeon; Swell 1.0." in path.read_text()


def test_a_tree_without_a_repository_has_no_known_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "RESULTS", tmp_path / "results")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit() == "unknown"
