"""Which connection is closed when a front end reaches its connection limit."""

import pytest

from server.http.connection_book import ConnectionTable, TooManyConnections, client_of


def test_a_client_that_opens_thousands_closes_its_own() -> None:
    book: ConnectionTable[str] = ConnectionTable(4)
    assert book.open("quiet", "a") is None
    for number in range(3):
        assert book.open(f"flood {number}", "b") is None
    assert book.open("flood 3", "b") == "flood 0"
    book.close("flood 0", "b")
    assert book.open("newcomer", "c") == "flood 1"
    book.close("flood 1", "b")
    assert len(book) == 4


def test_a_connection_that_is_being_answered_never_gives_way() -> None:
    book: ConnectionTable[str] = ConnectionTable(2)
    for name in ("first", "second"):
        book.open(name, "a")
        book.busy(name, "a")
    with pytest.raises(TooManyConnections):
        book.open("third", "b")
    assert len(book) == 2
    book.waiting("second", "a")
    assert book.open("third", "b") == "second"


def test_what_idles_longest_goes_first() -> None:
    book: ConnectionTable[str] = ConnectionTable(2)
    for name in ("first", "second"):
        book.open(name, "a")
    book.busy("first", "a")
    book.waiting("first", "a")
    assert book.open("third", "a") == "second"


def test_nothing_is_kept_of_those_that_left() -> None:
    book: ConnectionTable[int] = ConnectionTable(10)
    for number in range(50):
        book.open(number, f"client {number}")
        if number % 2:
            book.busy(number, f"client {number}")
            book.waiting(number, f"client {number}")
        book.close(number, f"client {number}")
        book.waiting(number, f"client {number}")
    assert len(book) == 0
    assert not book._counts
    assert not book._waiting


def test_a_host_that_owns_an_ipv6_network_is_one_client() -> None:
    assert client_of("2001:db8::1") == client_of("2001:db8::ffff:1")
    assert client_of("2001:db8::1") != client_of("2001:db8:0:1::1")
    assert client_of("10.0.0.1") != client_of("10.0.0.2")
    assert client_of("::ffff:10.0.0.1") == client_of("10.0.0.1")
    assert client_of("") == ""
