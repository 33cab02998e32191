"""Functions of installed packages that operators can call in engines."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.batch.executor import CannotDo
from engine.core import extensions
from engine.core.extensions import GROUP, Extensions, Worker
from engine.shared.plugins import BadPlugin
from tests.support.plugins import offer

WORKER: Any = Worker(3, 100, None)  # type: ignore[arg-type]


def scaled(worker: Worker, values: list[int], by: float = 1.0) -> dict[str, Any]:
    return {"rank": worker.rank, "scaled": [by * value for value in values]}


def endless(worker: Worker) -> str:
    return "x" * (extensions.MAX_RESULT + 1)


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    offer(tmp_path, GROUP, scaled=f"{__name__}:scaled", endless=f"{__name__}:endless")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("offered")
def test_arguments_and_results_follow_annotations() -> None:
    callable_ = Extensions(["scaled"], WORKER)
    assert json.loads(callable_.call("scaled", "[[1, 2]]", '{"by": 2.5}')) == {
        "rank": 3,
        "scaled": [2.5, 5.0],
    }


@pytest.mark.usefixtures("offered")
@pytest.mark.parametrize(
    ("name", "args", "kwargs", "error"),
    [
        ("scaled", '["1, 2"]', "{}", "wrong arguments for scaled: Expected `array`"),
        ("scaled", "[[1], 2.0, 3]", "{}", "too many positional arguments"),
        ("scaled", "[]", "{}", "missing a required argument"),
        ("scaled", "[[1]]", '{"worker": 5}', "multiple values"),
        ("scaled", "nonsense", "{}", "wrong arguments for scaled"),
        ("test", "[]", "{}", "no callable method 'test'"),
        ("__class__", "[]", "{}", "no callable method '__class__'"),
        ("endless", "[]", "{}", ", more than "),
    ],
)
def test_unlisted_functions_and_mistyped_arguments_are_refused(
    name: str, args: str, kwargs: str, error: str
) -> None:
    with pytest.raises(CannotDo, match=error):
        Extensions(["scaled", "endless"], WORKER).call(name, args, kwargs)


@pytest.mark.usefixtures("offered")
def test_unknown_extension_is_refused_at_start() -> None:
    with pytest.raises(ValueError, match=r"--worker-extensions other.*there are endless, scaled"):
        Extensions(["other"], WORKER)


NUMBER = 3


def vague(worker: Worker, what: "NoSuchType") -> None:  # type: ignore[name-defined]  # noqa: F821
    raise AssertionError


def test_an_extension_that_no_call_could_reach_is_refused_at_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    offer(tmp_path, GROUP, number=f"{__name__}:NUMBER", vague=f"{__name__}:vague")
    monkeypatch.syspath_prepend(tmp_path)
    for name, reason in (("number", "expected a function, got int"), ("vague", "NoSuchType")):
        with pytest.raises(BadPlugin, match=f"--worker-extensions {name}: .*{reason}"):
            Extensions([name], WORKER)
