"""The registry of adapters: loaded when all engines have it, gone when nobody needs it."""

import random
from typing import Any

import pytest

from coordinator.adapters import MAX_ENTRIES, AdapterRegistry
from engine.shared.messages import (
    AdapterEntry,
    AdapterLoadResult,
    AdapterRequest,
    AdaptersInUse,
    AdapterTable,
)

E0, E1 = (0, 100), (1, 101)
F0, F1 = (0, 500), (1, 501)


class Cluster:
    """A registry with engines and front ends that do as told, each when the test lets it."""

    def __init__(self, *modules: str) -> None:
        self.registry = AdapterRegistry()
        entries = [AdapterEntry(i, name, name, confined=False) for i, name in enumerate(modules, 1)]
        self.registry.adopt_newer(AdapterTable(0, entries))
        self.engines, self.front_ends = {E0, E1}, {F0, F1}
        self.in_use: dict[Any, set[str]] = {F0: set(), F1: set()}

    @property
    def table(self) -> AdapterTable:
        assert self.registry.table is not None
        return self.registry.table

    @property
    def states(self) -> list[tuple[str, str]]:
        return [(entry.name, entry.state) for entry in self.table.entries]

    def engine(self, engine: Any, error: str = "", version: str = "") -> None:
        """An engine has read all of the table."""
        held = [
            AdapterLoadResult(each.serial, error=error)
            if error and each.state == "loading"
            else AdapterLoadResult(each.serial, each.version or version or f"v-{each.path}")
            for each in self.table.entries
        ]
        self.registry.held[engine] = {each.serial: each for each in held}
        self.advance()

    def front_end(self, front_end: Any) -> None:
        """A front end has taken the newest table."""
        index, incarnation = front_end
        in_use = sorted(self.in_use[front_end])
        report = AdaptersInUse(index, incarnation, self.table.revision, in_use)
        self.registry.known[front_end] = report
        self.advance()

    def advance(self) -> bool:
        return self.registry.advance(self.engines, self.front_ends)

    def request(self, ticket: int, name: str, path: str | None, *, in_place: bool = False) -> None:
        self.advance()
        self.registry.handle_request(AdapterRequest(ticket, name, path, in_place))
        self.advance()

    def everybody(self) -> None:
        for _ in range(4):
            for engine in self.engines:
                self.engine(engine)
            for front_end in self.front_ends:
                self.front_end(front_end)

    def outcome(self, ticket: int) -> tuple[int, str] | None:
        view = self.registry.view
        assert view is not None
        found = {each.ticket: (each.status, each.reason) for each in view.outcomes}
        return found.get(ticket)


def test_adapter_is_served_once_all_engines_and_front_ends_know_it() -> None:
    cluster = Cluster()
    cluster.request(7, "sql", "sql")
    assert cluster.states == [("sql", "loading")]
    cluster.engine(E0)
    assert not cluster.table.serving
    cluster.engine(E1)
    assert cluster.table.serving["sql"].version == "v-sql"
    cluster.front_end(F0)
    assert cluster.outcome(7) is None
    cluster.front_end(F1)
    assert cluster.outcome(7) == (200, "")


def test_second_load_ignores_engine_reports_of_first() -> None:
    cluster = Cluster("law")
    cluster.everybody()
    cluster.request(7, "sql", "sql")
    cluster.engine(E0, error="there is no adapter_config.json")
    cluster.request(8, "sql", "sql")  # engines have not been heard of since
    assert cluster.outcome(8) is None
    cluster.everybody()
    assert cluster.outcome(8) == (200, "")


def test_adapter_that_one_engine_cannot_read_is_dropped_by_all() -> None:
    cluster = Cluster()
    cluster.request(7, "sql", "sql")
    cluster.engine(E0)
    cluster.engine(E1, error="there is no adapter_config.json")
    status, reason = cluster.outcome(7) or (0, "")
    assert status == 400
    assert "adapter_config.json (engine 1)" in reason
    assert cluster.states == []


def test_engines_that_read_different_files_are_distinguished() -> None:
    cluster = Cluster()
    cluster.request(7, "sql", "sql")
    cluster.engine(E0, version="a")
    cluster.engine(E1, version="b")
    assert "different files" in (cluster.outcome(7) or (0, ""))[1]


def test_load_does_not_wait_for_starting_or_dead_engines() -> None:
    cluster = Cluster()
    cluster.engines = {E0}
    cluster.request(7, "sql", "sql")
    cluster.engine(E0)
    assert cluster.table.serving
    cluster.engines = {E0, E1}
    cluster.request(8, "law", "law")
    cluster.engine(E0)
    assert "law" not in cluster.table.serving
    cluster.engines = {E0}
    cluster.registry.held.pop(E1, None)
    cluster.advance()
    assert "law" in cluster.table.serving


def test_unloading_waits_for_front_ends_and_for_their_last_requests() -> None:
    cluster = Cluster("sql")
    cluster.everybody()
    cluster.in_use[F1] = {"v-sql"}
    cluster.request(9, "sql", None)
    assert cluster.states == [("sql", "leaving")]
    cluster.front_end(F0)
    assert cluster.outcome(9) is None
    cluster.front_end(F1)
    assert cluster.outcome(9) == (200, "")
    assert cluster.states == [("sql", "leaving")], "a request runs with it"
    cluster.in_use[F1] = set()
    cluster.front_end(F1)
    assert cluster.states == []


def test_new_adapter_with_same_name_is_new_entry() -> None:
    cluster = Cluster("sql")
    cluster.everybody()
    cluster.request(7, "sql", "other")
    assert (cluster.outcome(7) or (0,))[0] == 400
    cluster.in_use[F0] = {"v-sql"}
    cluster.request(8, "sql", "other", in_place=True)
    for engine in (E0, E1):
        cluster.engine(engine)
    assert cluster.states == [("sql", "leaving"), ("sql", "serving")]
    assert cluster.table.serving["sql"].version == "v-other"
    cluster.in_use[F0] = set()
    cluster.everybody()
    assert cluster.states == [("sql", "serving")]
    assert cluster.outcome(8) == (200, "")


def test_unload_does_not_wait_for_dead_front_end() -> None:
    cluster = Cluster("sql")
    cluster.everybody()
    cluster.in_use[F1] = {"v-sql"}
    cluster.front_end(F1)
    cluster.request(9, "sql", None)
    cluster.front_ends = {F0}
    cluster.front_end(F0)
    assert cluster.states == []
    assert cluster.outcome(9) == (200, "")


def test_repeated_request_is_applied_once() -> None:
    cluster = Cluster()
    for _ in range(3):
        cluster.request(7, "sql", "sql")
    assert cluster.states == [("sql", "loading")]
    cluster.everybody()
    for _ in range(3):
        cluster.request(7, "sql", "sql")
        cluster.everybody()
    assert cluster.states == [("sql", "serving")]
    cluster.request(8, "none", None)
    assert (cluster.outcome(8) or (0,))[0] == 404


def test_load_fails_without_engines_or_beyond_limit() -> None:
    cluster = Cluster(*(f"a{i}" for i in range(MAX_ENTRIES)))
    cluster.request(7, "sql", "sql")
    assert (cluster.outcome(7) or (0,))[0] == 400
    empty = Cluster()
    empty.engines = set()
    empty.request(7, "sql", "sql")
    assert (empty.outcome(7) or (0,))[0] == 503


def test_restarted_coordinator_adopts_newest_adapter_table() -> None:
    before = Cluster("art")
    before.everybody()
    before.request(7, "sql", "sql")
    before.everybody()
    before.request(8, "law", "law")
    before.engine(E0)
    old = before.table

    after = Cluster.__new__(Cluster)
    after.registry = AdapterRegistry()
    after.engines, after.front_ends = {E0, E1}, {F0, F1}
    after.in_use = {F0: set(), F1: set()}
    assert not after.advance()
    assert after.registry.view is None
    after.registry.adopt_newer(AdapterTable(0, [AdapterEntry(1, "art", "art", confined=False)]))
    after.registry.adopt_newer(old)
    after.registry.adopt_newer(AdapterTable(1))
    assert after.table == old
    after.request(8, "law", "law")  # its front end asks on
    after.request(7, "sql", "sql")
    after.everybody()
    assert dict(after.states) == {"art": "serving", "sql": "serving", "law": "serving"}
    assert after.outcome(8) == (200, "")
    assert after.outcome(7) == (200, "")


@pytest.mark.parametrize("seed", range(20))
def test_random_order_never_serves_missing_or_drops_used_adapters(
    seed: int,
) -> None:
    source, cluster = random.Random(seed), Cluster("a", "b")
    known: dict[Any, AdapterTable] = {}
    for ticket in range(1, 200):
        match source.randrange(5):
            case 0:
                name = source.choice("abc")
                cluster.request(ticket, name, source.choice("wxyz"), in_place=source.random() < 0.5)
            case 1:
                cluster.request(ticket, source.choice("abc"), None)
            case 2:
                cluster.engine(source.choice([E0, E1]), error=source.choice(["", "", "bad"]))
            case 3:
                front_end = source.choice([F0, F1])
                known[front_end] = cluster.table
                serving = sorted(each.version for each in cluster.table.serving.values())
                cluster.in_use[front_end] |= set(serving[:1])
                cluster.front_end(front_end)
            case 4:
                cluster.in_use[source.choice([F0, F1])].clear()
                cluster.advance()
        held = [
            {each.serial for each in cluster.registry.held.get(engine, {}).values()}
            for engine in (E0, E1)
        ]
        for entry in cluster.table.serving.values():
            assert all(entry.serial in each for each in held)
        kept = {entry.version for entry in cluster.table.entries}
        for front_end in known:
            assert set(cluster.registry.known[front_end].versions) <= kept
    cluster.in_use = {F0: set(), F1: set()}
    cluster.everybody()
    assert {state for _, state in cluster.states} <= {"serving"}
