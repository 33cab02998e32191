"""What the comparison says about the machine, and how results are kept."""

from pathlib import Path

import pytest

from benchmarks.side_by_side import (
    Processor,
    Results,
    Run,
    Start,
    as_markdown,
    commit,
    insert_first,
    keep,
    processor_of,
)

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


def test_processor_without_feature_list_has_a_name() -> None:
    assert processor_of("").summary.endswith(" (none of the features looked for)")


def test_the_file_of_a_processor_is_named_after_it() -> None:
    assert XEON.file_name == "some-xeon-cpu-family-6-model-167.md"


def test_newest_comparison_comes_first(tmp_path: Path) -> None:
    insert_first(tmp_path, XEON, "Monday, commit a", "| 1 |")
    path = insert_first(tmp_path, XEON, "Tuesday, commit b", "| 2 |")
    assert path.read_text().split("\n\n")[2:] == [
        "## Tuesday, commit b", "| 2 |", "## Monday, commit a", "| 1 |\n",
    ]  # fmt: skip
    assert path.read_text().startswith("# Some(R) Xeon(R) CPU, family 6, model 167\n\n")


def test_continued_comparison_replaces_its_earlier_state(tmp_path: Path) -> None:
    insert_first(tmp_path, XEON, "Monday, commit a", "| 1 |")
    insert_first(tmp_path, XEON, "Tuesday, commit b", "| 2 |")
    text = insert_first(tmp_path, XEON, "Monday, commit a", "| 3 |").read_text()
    assert text.index("| 3 |") < text.index("| 2 |")
    assert "| 1 |" not in text


def test_results_are_kept_with_their_commit_and_rounds(tmp_path: Path) -> None:
    results = Results("2 cores Some Xeon", {"Swell": "1.0"}, "2026-11-24 03:00", "abc1234")
    keep(results, tmp_path)
    assert not list(tmp_path.iterdir())
    results.runs.append(Run("0.4b 16/128 x1", "Swell", 1, 0, 12.5))
    keep(results, tmp_path)
    (path,) = tmp_path.iterdir()
    assert "## 2026-11-24 03:00 UTC, commit abc1234" in path.read_text()
    assert "2 cores Some Xeon; Swell 1.0." in path.read_text()


def test_a_tree_without_a_repository_has_no_known_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit(tmp_path / "results") == "unknown"
    assert len(commit().split()[0]) >= 7


def test_each_side_uses_its_best_number_of_engines() -> None:
    results = Results("here", {}, "2026-11-24 03:00", "abc1234")
    for name, side, engines, values in (
        ("2-layer 100/128 x64", "vLLM", 1, (100, 300, 200)),
        ("2-layer 100/128 x64", "Swell", 1, (700, 700)),
        ("2-layer 100/128 x64", "Swell", 2, (800, 800)),
        ("0.4b 16/128 x1", "vLLM", 1, (40,)),
        ("0.4b 16/128 x1", "Swell", 1, (20,)),
        ("0.4b 16/128 x1", "vLLM in Swell", 1, (50,)),
    ):
        results.runs += [Run(name, side, engines, at, value) for at, value in enumerate(values)]
    results.starts.append(Start("Swell", "2-layer", 2, 0, 1.9, 693.0))
    lines = as_markdown(results).splitlines()
    assert [line for line in lines if line.startswith(("| 0.4b", "| 2-layer"))] == [
        "| 0.4b 16/128 x1 | ms per token | 40.0 (40.0 to 40.0) | 20.0 (20.0 to 20.0) | 2.00x |"
        " 50.0 (50.0 to 50.0) | 0.80x | >= 1.1x |",
        "| 2-layer 100/128 x64 | output tok/s | 200 (100 to 300), DP=1 | 800 (800 to 800), DP=2 |"
        " 4.00x |  |  | >= 3.2x |",
        "| 2-layer | Swell | 2 | 1.9 | 693 |",
    ]
