"""A front end's view of adapters, its reports on them, and routing of their requests."""

from msgspec.structs import replace

from engine.shared.messages import (
    AdapterEntry,
    AdaptersInUse,
    AdaptersView,
    AdapterTable,
)
from server.router.adapters import REPEAT_INTERVAL, Adapters
from server.router.routing import Choice, EngineLoad, with_adapter

SQL = AdapterEntry(1, "sql", "/a/sql", "v1", "serving")


def view(revision: int, *entries: AdapterEntry) -> AdaptersView:
    return AdaptersView(AdapterTable(revision, list(entries)), [])


def test_only_served_adapters_can_be_named() -> None:
    adapters = Adapters(0, 9)
    assert adapters.version("sql") is None
    adapters.take(
        view(
            3,
            SQL,
            AdapterEntry(2, "law", "law"),
            replace(SQL, serial=3, name="art", state="leaving"),
        )
    )
    assert adapters.served == {"sql": "/a/sql"}
    assert [adapters.version(name) for name in ("sql", "law", "art")] == ["v1", None, None]


def test_older_adapter_view_is_ignored() -> None:
    adapters = Adapters(0, 9)
    adapters.take(view(3, SQL))
    adapters.take(view(1))
    adapters.take(None)
    assert adapters.version("sql") == "v1"
    adapters.take(view(4))
    assert adapters.version("sql") is None


def test_adapter_use_is_reported_on_change_and_repeated() -> None:
    adapters = Adapters(2, 9)
    assert adapters.notice(0.0) is None
    adapters.take(view(3, SQL))
    assert adapters.notice(0.0) == AdaptersInUse(2, 9, 3)
    assert adapters.notice(0.1) is None
    adapters.lease("v1")
    adapters.lease("v1")
    adapters.lease("")
    assert adapters.notice(0.2) == AdaptersInUse(2, 9, 3, ["v1"])
    adapters.release("v1")
    assert adapters.notice(0.3) is None
    adapters.release("v1")
    adapters.release("")
    assert adapters.notice(0.4) == AdaptersInUse(2, 9, 3)
    assert adapters.notice(0.4 + REPEAT_INTERVAL) == AdaptersInUse(2, 9, 3)


def test_engine_with_resident_adapter_is_preferred_at_equal_load() -> None:
    loads = [EngineLoad(rank, requests, 0, 0, 0.0) for rank, requests in enumerate((2, 2, 3))]
    choice = Choice(0, "tie")
    assert with_adapter(choice, loads, {1}) == Choice(1, "adapter")
    assert with_adapter(choice, loads, {2}) == choice, "it is busier"
    assert with_adapter(choice, loads, {0, 1}) == choice
    assert with_adapter(choice, loads, set()) == choice
