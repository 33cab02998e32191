"""Tenant limits across front ends without shared memory, exchanged through the coordinator."""

import pytest

from coordinator.tenants import TenantUsage
from engine.shared.messages import ClusterView, TenantUse
from server.access.admission import (
    MAX_AGE,
    MAX_TENANTS,
    REPEAT_INTERVAL,
    Admission,
    Overloaded,
    RemoteTenants,
    Reservation,
)
from server.access.admission_table import AdmissionTable
from server.config import OverloadConfig, TenantConfig

SEARCH, BATCH = 11, 12


class Cluster:
    """Front ends, each with its own table, and a coordinator."""

    def __init__(self, number: int) -> None:
        self.usage = TenantUsage()
        self.now = 100.0
        self.tables = [AdmissionTable(None) for _ in range(number)]
        self.remote_tenants = [
            RemoteTenants(table, index, 7) for index, table in enumerate(self.tables)
        ]
        self.publish()

    def publish(self, *, counted: bool = True) -> None:
        tenants = self.usage.sums if counted else None
        view = ClusterView(1, 1, 0, False, [], len(self.tables), tenants=tenants)
        for each in self.remote_tenants:
            each.take(view, self.now)

    def settle(self) -> None:
        """Exchange usage between all front ends and the coordinator."""
        for each in self.remote_tenants:
            notice = each.notice(self.now)
            if notice is not None:
                self.usage.take(notice)
        self.publish()

    def admission(self, index: int, **limits: int) -> Admission:
        return Admission(
            self.tables[index],
            OverloadConfig(max_queue=1000),
            lambda: 100,
            TenantConfig(**limits),  # type: ignore[arg-type]
            remote_tenants=self.remote_tenants[index],
        )

    def reserve(self, admission: Admission, slot: int, tenant: int, tokens: int = 1) -> Reservation:
        return admission.reserve(1, tokens, self.now, slot, tenant)


def test_limit_of_a_key_applies_over_all_nodes() -> None:
    cluster = Cluster(3)
    nodes = [cluster.admission(index, max_sequences_per_key=4) for index in range(3)]
    # A tenant's index in the table can differ between nodes.
    held = [cluster.reserve(node, 3 + i, SEARCH) for i, node in enumerate(nodes)]
    cluster.settle()
    held.append(cluster.reserve(nodes[0], 3, SEARCH))
    cluster.settle()
    for i, node in enumerate(nodes):
        with pytest.raises(Overloaded, match="max_sequences_per_key is 4"):
            cluster.reserve(node, 3 + i, SEARCH)
        cluster.reserve(node, 1, BATCH)
    held[1].release()
    cluster.settle()
    cluster.reserve(nodes[2], 5, SEARCH)


def test_waiting_tokens_of_a_key_have_one_limit_over_all_nodes() -> None:
    cluster = Cluster(2)
    first, second = (cluster.admission(i, max_queue_tokens_per_key=100) for i in range(2))
    held = cluster.reserve(first, 3, SEARCH, 80)
    cluster.settle()
    with pytest.raises(Overloaded, match="max_queue_tokens_per_key"):
        cluster.reserve(second, 3, SEARCH, 50)
    held.computed(60)
    cluster.settle()
    taken = cluster.reserve(second, 3, SEARCH, 50)
    with pytest.raises(Overloaded, match="max_queue_tokens_per_key"):
        taken.recount(90, cluster.now)


def test_remote_usage_expires_without_coordinator_and_with_its_front_end() -> None:
    cluster = Cluster(2)
    first, second = (cluster.admission(i, max_sequences_per_key=1) for i in range(2))
    cluster.reserve(first, 3, SEARCH)
    cluster.settle()
    with pytest.raises(Overloaded):
        cluster.reserve(second, 3, SEARCH)
    assert cluster.usage.keep({(1, 7)})
    assert not cluster.usage.keep({(1, 7)})
    cluster.publish()
    cluster.reserve(second, 3, SEARCH).release()
    cluster.now += REPEAT_INTERVAL
    cluster.settle()  # it is still there, and says so
    with pytest.raises(Overloaded):
        cluster.reserve(second, 3, SEARCH)
    cluster.now += MAX_AGE + 1
    cluster.reserve(second, 3, SEARCH)


def test_only_changes_are_reported_up_to_view_limit() -> None:
    cluster = Cluster(1)
    node, remote_tenants = cluster.admission(0, max_sequences_per_key=4), cluster.remote_tenants[0]
    held = [cluster.reserve(node, slot, slot) for slot in range(MAX_TENANTS + 5)]
    held.append(cluster.reserve(node, MAX_TENANTS + 1, MAX_TENANTS + 1))
    notice = remote_tenants.notice(cluster.now)
    assert notice is not None
    assert len(notice.tenants) == MAX_TENANTS
    table = cluster.tables[0].name
    assert notice.tenants[0] == TenantUse(table, MAX_TENANTS + 1, 2, 0)
    assert remote_tenants.notice(cluster.now) is None
    for each in held:
        each.release()
    notice = remote_tenants.notice(cluster.now)
    assert notice is not None
    assert notice.tenants == []


def test_a_coordinator_of_the_previous_release_gets_no_reports() -> None:
    cluster = Cluster(1)
    cluster.publish(counted=False)
    cluster.reserve(cluster.admission(0, max_sequences_per_key=4), 3, SEARCH)
    assert cluster.remote_tenants[0].notice(cluster.now) is None
