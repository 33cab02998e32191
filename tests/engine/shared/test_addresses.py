"""Addresses as text, families of names, and listening on both families."""

import socket
from contextlib import closing

import pytest

from engine.shared.addresses import (
    BadAddress,
    address_towards,
    is_loopback,
    join_host_port,
    listen,
    split_host_port,
    uses_ipv6,
)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("head:7550", "head", 7550),
        ("10.0.0.1:1", "10.0.0.1", 1),
        ("[::1]:7550", "::1", 7550),
        ("[fe80::1%eth0]:9", "fe80::1%eth0", 9),
        ("*:65535", "*", 65535),
    ],
)
def test_host_and_port_are_split_and_joined_again(text: str, host: str, port: int) -> None:
    assert split_host_port(text) == (host, port)
    assert join_host_port(host, port) == text


@pytest.mark.parametrize("text", ["::1:7550", "fd00::1", "head", "head:", ":7550", "head:x", ""])
def test_invalid_host_and_port_is_refused(text: str) -> None:
    with pytest.raises(BadAddress):
        split_host_port(text)


def test_existing_brackets_are_not_doubled() -> None:
    assert join_host_port("[fd00::5]", 1) == "[fd00::5]:1"


def test_a_socket_is_of_the_family_that_its_host_has() -> None:
    assert uses_ipv6("::1")
    assert uses_ipv6("[fd00::1]")
    assert uses_ipv6("*")
    assert not uses_ipv6("0.0.0.0")
    assert not uses_ipv6("10.0.0.1")


def test_a_name_takes_the_family_that_the_system_prefers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "old": [(socket.AF_INET, 1, 6, "", ("10.0.0.1", 0))],
        "both": [
            (socket.AF_INET, 1, 6, "", ("10.0.0.1", 0)),
            (socket.AF_INET6, 1, 6, "", ("fd00::1", 0, 0, 0)),
        ],
        "new": [(socket.AF_INET6, 1, 6, "", ("fd00::1", 0, 0, 0))],
    }

    def look_up(host: str, port: int, **_: object) -> object:
        if host not in found:
            raise socket.gaierror
        return found[host]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    families = [uses_ipv6(name) for name in ("old", "both", "new", "nobody-knows-it-yet")]
    assert families == [False, False, True, True]


def test_loopback_addresses_of_both_families_are_known() -> None:
    assert [is_loopback(host) for host in ("127.0.0.5", "::1", "10.0.0.1", "fd00::1", "head")] == [
        True, True, False, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize("host", ["*", "::"])
def test_all_interfaces_include_ipv4_and_ipv6(host: str) -> None:
    with closing(listen(host, 0, 5)) as listener:
        port = listener.getsockname()[1]
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, port), timeout=5).close()


def test_all_interfaces_without_ipv6_are_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with closing(listen("*", 0, 5)) as listener:
        assert listener.family == socket.AF_INET


def test_port_in_use_is_an_error() -> None:
    with closing(listen("*", 0, 5)) as listener, pytest.raises(OSError, match="in use"):
        listen("*", listener.getsockname()[1], 5)


def test_route_to_address_has_same_family() -> None:
    assert address_towards("127.0.0.1", 9) == "127.0.0.1"
    assert address_towards("::1", 9) == "::1"
