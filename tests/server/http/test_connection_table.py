"""Which connection is closed when a front end reaches its connection limit."""

import pytest

from server.http.connection_table import ConnectionTable, TooManyConnections, client_of


def test_client_with_most_connections_loses_its_own() -> None:
    table: ConnectionTable[str] = ConnectionTable(4)
    assert table.open("quiet", "a") is None
    for number in range(3):
        assert table.open(f"flood {number}", "b") is None
    assert table.open("flood 3", "b") == "flood 0"
    table.close("flood 0", "b")
    assert table.open("newcomer", "c") == "flood 1"
    table.close("flood 1", "b")
    assert len(table) == 4


def test_connection_being_answered_is_never_closed() -> None:
    table: ConnectionTable[str] = ConnectionTable(2)
    for name in ("first", "second"):
        table.open(name, "a")
        table.busy(name, "a")
    with pytest.raises(TooManyConnections):
        table.open("third", "b")
    assert len(table) == 2
    table.waiting("second", "a")
    assert table.open("third", "b") == "second"


def test_longest_idle_connection_is_closed_first() -> None:
    table: ConnectionTable[str] = ConnectionTable(2)
    for name in ("first", "second"):
        table.open(name, "a")
    table.busy("first", "a")
    table.waiting("first", "a")
    assert table.open("third", "a") == "second"


def test_closed_connections_leave_no_state() -> None:
    table: ConnectionTable[int] = ConnectionTable(10)
    for number in range(50):
        table.open(number, f"client {number}")
        if number % 2:
            table.busy(number, f"client {number}")
            table.waiting(number, f"client {number}")
        table.close(number, f"client {number}")
        table.waiting(number, f"client {number}")
    assert len(table) == 0
    assert not table._counts
    assert not table._waiting


def test_a_host_that_owns_an_ipv6_network_is_one_client() -> None:
    assert client_of("2001:db8::1") == client_of("2001:db8::ffff:1")
    assert client_of("2001:db8::1") != client_of("2001:db8:0:1::1")
    assert client_of("10.0.0.1") != client_of("10.0.0.2")
    assert client_of("::ffff:10.0.0.1") == client_of("10.0.0.1")
    assert client_of("") == ""
