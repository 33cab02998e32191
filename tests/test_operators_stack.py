"""Operators' calls on a loaded stack: nothing is lost but what `abort` ends."""

from collections.abc import Iterator

import pytest

from benchmarks.operator_calls import CASES, Scene, running_scene, see

pytestmark = [pytest.mark.stack, pytest.mark.slow]

ELSEWHERE = ("killed", "/scale_elastic_ep", "/admin/restart")
"""In the tests of halted engines and of scaling."""


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with running_scene(clients=8) as started:
        yield started


@pytest.mark.parametrize(
    "case", [case for case in CASES if not any(part in case for part in ELSEWHERE)]
)
def test_clients_lose_nothing_but_what_is_aborted(scene: Scene, case: str) -> None:
    before = scene.versions()
    seen = see(scene, case)
    assert seen.lost == []
    assert bool(seen.aborted) == ("abort" in case)
    assert len(scene.versions()) == 1
    # The first engine may serve the new weights until the second one refuses them.
    tried = {"fails"} if "cannot load" in case else set()
    assert seen.versions <= before | scene.versions() | tried
