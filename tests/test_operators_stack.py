"""Operators' calls on a loaded stack: nothing is lost but what `abort` ends."""

from collections.abc import Iterator

import pytest

from benchmarks.operator_calls import CASES, Scene, running_scene, see

pytestmark = [pytest.mark.stack, pytest.mark.slow]

ELSEWHERE = ("killed", "/scale_elastic_ep", "/admin/restart", "rolling", "in place")
"""In the tests of halted engines, of scaling, and of weights."""
COMPOSED = "/sleep?level=1&mode=wait"
"""Is a pause that waits, and a sleep that keeps."""
BESIDE_STREAMS = [
    "/reset_prefix_cache",
    "/reset_mm_cache, /reset_encoder_cache",
    "/collective_rpc",
    "execute_dummy_batch, get_supported_tasks",
    "/start_profile, /stop_profile",
    "/is_paused and others that only tell",
]
"""Calls that no stream waits for."""
BY_ITSELF = [
    case
    for case in CASES
    if case not in (COMPOSED, *BESIDE_STREAMS) and not any(part in case for part in ELSEWHERE)
]


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with running_scene(num_clients=4) as started:
        yield started


@pytest.mark.parametrize("cases", [BESIDE_STREAMS, *([case] for case in BY_ITSELF)], ids=" ".join)
def test_operator_calls_end_only_aborted_requests(scene: Scene, cases: list[str]) -> None:
    before = scene.versions()
    seen = see(scene, *cases)
    assert seen.lost == []
    assert bool(seen.aborted) == ("abort" in cases[0])
    assert len(scene.versions()) == 1
    # The first engine may serve the new weights until the second one refuses them.
    tried = {"fails"} if "cannot load" in cases[0] else set()
    assert seen.versions <= before | scene.versions() | tried
