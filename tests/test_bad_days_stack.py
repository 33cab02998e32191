"""A node on a bad day, under load: nobody's request fails, and it becomes whole again.

The most telling days; `python -m benchmarks.bad_days` lives through all of them, and holds them to
30 s, which a machine that does much else cannot promise.
"""

import pytest

from benchmarks.bad_days import SCENARIOS, run_scenario
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.stack


@pytest.mark.parametrize("name", ["stderr not read", "files cleaned", "no descriptors"])
def test_service_continues_and_recovers(name: str) -> None:
    outcome = run_scenario(SCENARIOS[name], clients=3, recovery_seconds=PATIENCE)
    assert outcome.failures == []
    assert outcome.recovered_after is not None, "never whole again"
    assert outcome.stopped_cleanly
