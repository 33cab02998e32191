"""Engines that shall be there and are not: which, why and for how long."""

from pathlib import Path

import pytest

from coordinator.config import CoordinatorConfig
from coordinator.placement import MAX_MISSING_AGE, ExpectedEngines
from engine.shared.messages import MissingEngine
from engine.shared.settings import SettingsError, load


def test_engines_that_never_joined_are_missing_up_to_expected_number() -> None:
    expected = ExpectedEngines(4)
    assert expected.missing({0, 2}, 10.0) == [
        MissingEngine(1, "not_joined", 0.0), MissingEngine(3, "not_joined", 0.0)
    ]  # fmt: skip
    assert expected.missing({0, 1, 2}, 25.0) == [MissingEngine(3, "not_joined", 15.0)]
    assert expected.missing({0, 1, 2, 3}, 26.0) == []
    assert expected.missing({0, 1, 2, 5}, 27.0) == [], "as many as there shall be, whatever ranks"


def test_lost_engine_is_missing_with_reason_until_its_rank_is_filled() -> None:
    expected = ExpectedEngines(3)
    assert expected.missing({0, 1, 2}, 0.0) == []
    expected.left(1, "silent")
    assert expected.missing({0, 2}, 5.0) == [MissingEngine(1, "silent", 0.0)]
    assert expected.missing({0, 2}, 605.0) == [MissingEngine(1, "silent", 600.0)]
    assert expected.missing({0, 1, 2}, 606.0) == []
    expected.left(1, "died")
    assert expected.missing({0, 2}, 700.0) == [MissingEngine(1, "died", 0.0)]


def test_replacement_with_other_rank_counts_and_lost_engine_is_forgotten() -> None:
    expected = ExpectedEngines(2)
    expected.left(0, "died")
    assert expected.missing({1}, 0.0) == [MissingEngine(0, "died", 0.0)]
    assert expected.missing({1, 7}, 1.0) == []
    assert expected.missing({1}, 2.0) == [MissingEngine(0, "not_joined", 0.0)]


def test_drained_engine_is_missing_only_if_expected() -> None:
    known, unknown = ExpectedEngines(2), ExpectedEngines()
    for each in (known, unknown):
        each.left(1, "drained")
    assert known.missing({0}, 0.0) == [MissingEngine(1, "drained", 0.0)]
    assert unknown.missing({0}, 0.0) == []


def test_a_smaller_number_is_not_a_loss() -> None:
    expected = ExpectedEngines(4)
    expected.left(3, "drained")
    expected.left(2, "drained")
    expected.number = 2
    assert expected.missing({0, 1}, 0.0) == []
    expected.number = 3
    assert expected.missing({0, 1}, 1.0) == [MissingEngine(2, "not_joined", 0.0)]


def test_crashes_are_remembered_for_a_while_without_expected_number() -> None:
    expected = ExpectedEngines()
    expected.left(3, "died")
    assert expected.missing({0}, 0.0) == [MissingEngine(3, "died", 0.0)]
    assert expected.missing({0}, MAX_MISSING_AGE) == [MissingEngine(3, "died", MAX_MISSING_AGE)]
    assert expected.missing({0}, MAX_MISSING_AGE + 1) == []
    expected.left(2, "silent")
    assert expected.missing({0, 2}, MAX_MISSING_AGE + 2) == []


@pytest.mark.parametrize(
    ("text", "of_unnamed", "of_next"),
    [("", None, None), ("64", 64, None), ("next=6,4", 4, 6), ("next=6", None, 6)],
)
def test_setting_gives_expected_engines_per_group(
    text: str, of_unnamed: int | None, of_next: int | None
) -> None:
    environment = {"SWELL_EXPECTED_ENGINES": text} if text else {}
    publish = load(CoordinatorConfig, {}, environment).publish
    assert (publish.expected(""), publish.expected("next")) == (of_unnamed, of_next)


@pytest.mark.parametrize("wrong", ["many", "next=", "next=-1", "a b=2", "=3"])
def test_invalid_setting_is_refused_by_name(wrong: str) -> None:
    with pytest.raises(SettingsError, match="SWELL_EXPECTED_ENGINES"):
        load(CoordinatorConfig, {}, {"SWELL_EXPECTED_ENGINES": wrong})


def test_engines_of_absent_nodes_are_missing_from_start() -> None:
    expected = ExpectedEngines(planned=4)
    expected.follow(None)
    assert [each.rank for each in expected.missing([0, 1], 10.0)] == [2, 3]
    expected.follow(2)
    late = expected.missing([0, 1], 25.0)
    assert [(each.rank, each.reason, each.age) for each in late] == [
        (2, "not_joined", 15.0), (3, "not_joined", 15.0)
    ]  # fmt: skip
    expected.follow(6)
    assert expected.number == 6
    expected.planned = None
    expected.follow(2)
    assert expected.missing([0, 1], 30.0) == []


def test_expected_numbers_follow_changes_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "expected"
    publish = load(CoordinatorConfig, {"expected_engines_file": str(file)}, {}).publish
    for text, (one, other) in (("3\n", (3, None)), ("2,next=5", (2, 5)), ("", (None, None))):
        file.write_text(text, encoding="utf-8")
        assert (publish.expected(""), publish.expected("next")) == (one, other)
    file.write_text("many", encoding="utf-8")
    with pytest.raises(ValueError, match="Expected"):
        publish.expected("")
