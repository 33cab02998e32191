"""Limits of one tenant on a node, across all its front ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from server.access.admission import Admission, Overloaded
from server.access.admission_table import (
    TENANT_SLOTS,
    AdmissionTable,
    Totals,
    create_admission_table,
)
from server.access.tenants import named_tenant
from server.config import FrontEndConfig, GuardConfig, OverloadConfig, TenantConfig
from tests.server.conftest import tiny

ROOT = Path(__file__).parents[3]
HOG, GUEST, OTHER = 3, 7, TENANT_SLOTS - 1


def node(
    directory: Path | None = None,
    index: int = 0,
    *,
    slots: int = 8,
    several: bool = True,
    max_queue: int = 24,
    max_queue_tokens: int | None = None,
    **tenants: Any,
) -> Admission:
    limits = OverloadConfig(max_queue=max_queue, max_queue_tokens=max_queue_tokens)
    table = AdmissionTable(directory, index)
    return Admission(table, limits, lambda: slots, TenantConfig(**tenants), several=lambda: several)


def fill(admission: Admission, slot: int, requests: int = 1, tokens: int = 1) -> int:
    """Reserve until refused; return the number of sequences admitted."""
    for taken in range(10_000):
        try:
            admission.reserve(requests, tokens, 0.0, slot)
        except Overloaded:
            return taken * requests
    raise AssertionError("nothing was refused")


def test_one_tenant_does_not_fill_the_node() -> None:
    admission = node()
    assert fill(admission, HOG) == 16
    assert fill(admission, GUEST) == 8
    assert fill(admission, OTHER) == 4
    admission.reserve(1, 1, 0.0, 100)


def test_single_tenant_can_use_the_full_node() -> None:
    assert fill(node(several=False), 0) == 32


def test_free_engine_capacity_is_available_to_every_tenant() -> None:
    admission = node(slots=50, max_queue=4)
    assert fill(admission, HOG) == 50


def test_request_of_idle_tenant_is_accepted_while_it_fits() -> None:
    admission = node()
    admission.reserve(26, 1, 0.0, HOG)
    with pytest.raises(Overloaded, match="fair share of the queue"):
        admission.reserve(1, 1, 0.0, HOG)
    admission.reserve(5, 1, 0.0, GUEST)


def test_request_larger_than_queue_blocks_no_other_tenant() -> None:
    admission = node(slots=2, max_queue=8)
    with pytest.raises(Overloaded):
        admission.reserve(2000, 1, 0.0, HOG)
    assert admission.table.of_tenant(HOG) == admission.table.totals() == Totals(0, 0)
    admission.reserve(1, 1, 0.0, GUEST)


def test_sequences_per_key_are_limited() -> None:
    admission = node(several=False, max_sequences_per_key=5)
    reservations = [admission.reserve(2, 1, 0.0, HOG) for _ in range(2)]
    with pytest.raises(Overloaded, match=r"max_sequences_per_key is 5") as refused:
        admission.reserve(2, 1, 0.0, HOG)
    assert refused.value.what == "requests"
    admission.reserve(1, 1, 0.0, HOG)
    admission.reserve(5, 1, 0.0, GUEST)
    reservations[0].release()
    admission.reserve(2, 1, 0.0, HOG)


def test_queued_prompt_tokens_per_key_are_limited() -> None:
    admission = node(max_queue_tokens_per_key=100)
    first = admission.reserve(1, 80, 0.0, HOG)
    with pytest.raises(Overloaded, match="max_queue_tokens_per_key is 100") as refused:
        admission.reserve(1, 30, 0.0, HOG)
    assert refused.value.what == "prompt tokens"
    admission.reserve(1, 5000, 0.0, GUEST)
    second = admission.reserve(1, 10, 0.0, HOG)
    with pytest.raises(Overloaded):
        second.recount(60, 0.0)
    first.computed(80)
    second.recount(60, 0.0)
    assert admission.table.of_tenant(HOG) == Totals(2, 60)
    first.release()
    second.release()
    assert admission.table.of_tenant(HOG) == Totals(0, 0)


def test_one_tenant_does_not_fill_the_queue_of_tokens() -> None:
    admission = node(max_queue=1000, max_queue_tokens=400)
    assert fill(admission, HOG, tokens=10) == 20
    assert fill(admission, GUEST, tokens=10) == 10
    admission.reserve(1, 90, 0.0, OTHER)


def test_tenants_are_counted_over_all_front_ends(tmp_path: Path) -> None:
    create_admission_table(tmp_path, 2)
    here, there = (node(tmp_path, index, max_sequences_per_key=4) for index in range(2))
    slot = here.reserve(3, 1, 0.0, HOG)
    there.reserve(1, 1, 0.0, HOG)
    for admission in (here, there):
        with pytest.raises(Overloaded):
            admission.reserve(1, 1, 0.0, HOG)
        admission.reserve(1, 1, 0.0, GUEST)
    slot.release()
    assert fill(there, HOG) == 3


def test_reservations_of_killed_front_end_are_released(tmp_path: Path) -> None:
    create_admission_table(tmp_path, 2)
    program = (
        "import sys; from pathlib import Path\n"
        "from server.access.admission_table import AdmissionTable\n"
        "table = AdmissionTable(Path(sys.argv[1]), 1)\n"
        f"table.add(4, 9, {HOG}); table.add(1, 1, {OTHER})\n"
        "print('held', flush=True); sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    survivor = node(tmp_path, 0, max_sequences_per_key=4)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert survivor.table.of_tenant(HOG) == Totals(4, 9)
        with pytest.raises(Overloaded):
            survivor.reserve(1, 1, 0.0, HOG)
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate()
    survivor.reserve(4, 1, 0.0, HOG)
    assert survivor.table.of_tenant(OTHER) == Totals(0, 0)


class TestOverHttp:
    @pytest.fixture
    def config(self) -> FrontEndConfig:
        return tiny(
            guards=GuardConfig(api_key=("ann", "bob")),
            tenants=TenantConfig(max_sequences_per_key=4),
        )

    def test_request_beyond_limit_of_any_key_is_refused_permanently(self, http: Any) -> None:
        headers = {"Authorization": "Bearer ann"}
        for body, param in (
            ({"prompt": "x", "n": 5}, "n"),
            ({"prompt": ["x", "y"], "n": 3}, "prompt"),
        ):
            answer = http.post("/v1/completions", body, headers=headers)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param
            assert "max_sequences_per_key" in answer.json()["error"]["message"]

    def test_slots_are_reserved_for_the_key_and_released(
        self, app: Any, http: Any, engines: Any
    ) -> None:
        for _ in range(10):
            for key in ("ann", "bob"):
                headers = {"Authorization": f"Bearer {key}"}
                body = {"prompt": "x", "n": 4}
                assert http.post("/v1/completions", body, headers=headers).status_code == 200


def test_tenant_slots_stay_within_table_for_any_number_of_keys() -> None:
    assert named_tenant("x", TENANT_SLOTS + 5).slot == 5
