"""A server without a key accepts only host names that a foreign web page cannot have."""

import socket
from typing import Any

import pytest

from server.access.guards import KnownHosts, known_hosts
from server.config import FrontEndConfig, GuardConfig, HttpConfig

MINE = [
    "", "localhost", "LOCALHOST:8000", "api.localhost", "127.0.0.1:8000", "10.1.2.3", "[::1]:8000",
    "[fe80::1]", "api:8000", "host.docker.internal", "swell-api.llm.svc", "box.local",
    "swell-api.llm.svc.cluster.local:80", "localhost.",
]  # fmt: skip
OTHERS = [
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
    "evil.example.", "xlocal.example", "notlocalhost.com", "a.b@evil.example",
]  # fmt: skip


@pytest.mark.parametrize("host", MINE)
def test_addresses_and_private_names_are_known(host: str) -> None:
    assert KnownHosts(()).knows(host)


@pytest.mark.parametrize("host", OTHERS)
def test_public_domain_names_are_unknown_hosts(host: str) -> None:
    assert not KnownHosts(("llm.example.com", "*.swell.example")).knows(host)


@pytest.mark.parametrize(
    ("names", "host", "known"),
    [
        (("llm.example.com",), "LLM.example.com:443", True),
        (("llm.example.com",), "x.llm.example.com", False),
        (("*.example.com",), "a.b.example.com", True),
        (("*.example.com",), "example.com", False),
        (("*",), "evil.example", True),
    ],
)
def test_names_can_be_allowed_with_or_without_subdomains(
    names: tuple[str, ...], host: str, known: bool
) -> None:
    assert KnownHosts(names).knows(host) is known


@pytest.mark.parametrize(
    ("guards", "http", "checks"),
    [
        (GuardConfig(), HttpConfig(), True),
        (GuardConfig(), HttpConfig(host="0.0.0.0"), True),
        (GuardConfig(admin_key="x"), HttpConfig(), True),
        (GuardConfig(api_key=("x",)), HttpConfig(), False),
        (GuardConfig(ssl_certfile="x"), HttpConfig(), False),
        (GuardConfig(), HttpConfig(uds="/run/swell"), False),
        (GuardConfig(api_key=("x",), allowed_hosts=("a.example",)), HttpConfig(), True),
    ],
)
def test_hosts_are_checked_without_other_protection(
    guards: GuardConfig, http: HttpConfig, checks: bool
) -> None:
    hosts = known_hosts(FrontEndConfig(guards=guards, http=http))
    assert (hosts is not None) is checks
    if hosts is not None:
        assert hosts.knows(socket.gethostname())
        assert not hosts.knows("evil.example")


def test_foreign_page_is_refused_and_reason_is_logged(http: Any, engines: Any) -> None:
    for host, status in (("evil.example:8000", 403), ("127.0.0.1:8000", 200)):
        for path in ("/v1/models", "/health", "/metrics"):
            assert http.get(path, headers={"Host": host}).status_code == status
        answer = http.post("/v1/completions", {"prompt": "x"}, headers={"Host": host})
        assert answer.status_code == status
    answer = http.get("/v1/models", headers={"Host": "evil.example"})
    assert answer.json()["error"]["code"] == "unknown_host"
    assert "--allowed-hosts" in answer.json()["error"]["message"]
    assert answer.headers["x-request-id"]
    assert len(engines.streams) == 1


def test_listening_host_name_is_known() -> None:
    hosts = known_hosts(FrontEndConfig(http=HttpConfig(host="llm.example.com")))
    assert hosts is not None
    assert hosts.knows("llm.example.com:8000")
