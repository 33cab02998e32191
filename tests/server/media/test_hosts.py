"""Images are fetched only from allowed hosts, at checked addresses."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from server.media.decode import BadImage
from server.media.hosts import MAX_REDIRECTS, Hosts, is_public

pytestmark = pytest.mark.slow

IMAGE = b"not looked at here"


class Server:
    """A host on a local port that serves a fixed response per path."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes | Callable[[], bytes]] = {}
        self.asked: list[tuple[str, str]] = []
        self.port = 0
        self.resolved: list[str] = []
        self.addresses = ["127.0.0.1"]
        self.hangs = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path = head.split(" ")[1]
        host = next(line for line in head.lower().split("\r\n") if line.startswith("host:"))
        self.asked.append((host.partition(" ")[2], path))
        answer = self.answers.get(path, b"HTTP/1.1 404 Not Found\r\n\r\n")
        if path == "/slow":
            await self.hangs.wait()
        try:
            writer.write(answer() if callable(answer) else answer)
            await writer.drain()
        except OSError:
            pass
        writer.close()

    async def resolve(self, host: str, port: int) -> list[str]:
        self.resolved.append(host)
        return self.addresses

    def hosts(self, *domains: str, **options: Any) -> Hosts:
        """Return a fetcher for this host; only the machine's first address is allowed."""
        options = {
            "max_bytes": 1000, "seconds": 5.0, "resolve": self.resolve,
            "allows": lambda address: address == "127.0.0.1", **options,
        }  # fmt: skip
        return Hosts(domains or ("images.example.com",), **options)

    def url(self, path: str, host: str = "images.example.com") -> str:
        return f"http://{host}:{self.port}{path}"


def found(content: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)


def moved(to: str) -> bytes:
    return f"HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode()


@asynccontextmanager
async def served() -> AsyncIterator[Server]:
    here = Server()
    listener = await asyncio.start_server(here.serve, "127.0.0.1", 0)
    here.port = listener.sockets[0].getsockname()[1]
    try:
        yield here
    finally:
        here.hangs.set()
        listener.close()
        await listener.wait_closed()


async def refusal(hosts: Hosts, url: str) -> str:
    with pytest.raises(BadImage) as raised:
        await hosts.fetch(url)
    return str(raised.value)


async def test_an_image_of_an_allowed_host_is_fetched() -> None:
    async with served() as here:
        here.answers["/a.png?x=1"] = found(IMAGE)
        assert await here.hosts().fetch(here.url("/a.png?x=1")) == IMAGE
        assert here.asked == [(f"images.example.com:{here.port}", "/a.png?x=1")]
        below = here.url("/a.png?x=1", "IMAGES.example.com")
        assert await here.hosts("*.example.com").fetch(below) == IMAGE


@pytest.mark.parametrize(
    "host",
    ["example.com", "images.example.com.evil.org", "evilimages.example.com", "127.0.0.1", "[::1]"],
)
async def test_other_hosts_are_not_even_resolved(host: str) -> None:
    async with served() as here:
        assert "--allowed-media-domains" in await refusal(here.hosts(), here.url("/", host))
        assert here.resolved == []


@pytest.mark.parametrize(
    "url",
    [
        "http://images.example.com@evil.org/", "http://evil.org\\@images.example.com/",
        "http://images.example.com:port/", "http:///a", "http://images.example.com/a b",
        "http://images.example.com/\r\nX: y", "http://\u24d8mages.example.com/", "http://[::1/",
    ],
)  # fmt: skip
async def test_ambiguous_urls_are_refused(url: str) -> None:
    async with served() as here:
        await refusal(here.hosts(), url)
        assert (here.resolved, here.asked) == ([], [])


@pytest.mark.parametrize("others", [["10.0.0.1"], ["127.0.0.1", "10.0.0.1"], []])
async def test_host_with_any_private_address_is_refused(others: list[str]) -> None:
    async with served() as here:
        here.answers["/"] = found(IMAGE)
        here.addresses = others
        assert "not public" in await refusal(here.hosts(), here.url("/"))
        assert here.asked == []


async def test_host_name_is_resolved_only_once() -> None:
    async with served() as here:
        here.answers["/"] = found(IMAGE)

        async def rebinding(host: str, port: int) -> list[str]:
            here.resolved.append(host)
            return ["127.0.0.1"] if len(here.resolved) == 1 else ["169.254.169.254"]

        assert await here.hosts(resolve=rebinding).fetch(here.url("/")) == IMAGE
        assert here.resolved == ["images.example.com"]
        assert "not public" in await refusal(here.hosts(resolve=rebinding), here.url("/"))


@pytest.mark.parametrize(
    "to",
    [
        "http://127.0.0.1:{port}/b", "http://169.254.169.254/latest/meta-data", "file:///etc/passwd",
        "http://[::ffff:127.0.0.1]:{port}/b", "//localhost:{port}/b", "data:image/png;base64,AAAA",
        "http://other.example.com:{port}/b",
    ],
)  # fmt: skip
async def test_redirects_to_disallowed_hosts_are_refused(to: str) -> None:
    async with served() as here:
        here.answers |= {"/a": moved(to.format(port=here.port)), "/b": found(IMAGE)}
        await refusal(here.hosts(), here.url("/a"))
        assert [path for _, path in here.asked] == ["/a"]


async def test_redirects_are_resolved_and_checked_again() -> None:
    async with served() as here:
        here.answers |= {"/a": moved("/b"), "/b": found(IMAGE)}
        assert await here.hosts().fetch(here.url("/a")) == IMAGE
        assert len(here.resolved) == 2

        async def second_is_private(host: str, port: int) -> list[str]:
            here.resolved.append(host)
            return ["127.0.0.1"] if len(here.resolved) == 3 else ["10.0.0.1"]

        hosts = here.hosts(resolve=second_is_private)
        assert "not public" in await refusal(hosts, here.url("/a"))


async def test_number_of_redirects_is_limited() -> None:
    async with served() as here:
        here.answers["/a"] = moved("/a")
        assert "redirects" in await refusal(here.hosts(), here.url("/a"))
        assert len(here.asked) == MAX_REDIRECTS + 1


async def test_too_large_download_is_aborted() -> None:
    async with served() as here:
        endless = b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n" + b"x" * 100_000
        here.answers["/"] = endless
        assert "more than 1000 bytes" in await refusal(here.hosts(), here.url("/"))


@pytest.mark.parametrize(
    "answer", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab",
               b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"],
)  # fmt: skip
async def test_bad_answer_of_host_is_a_client_error(answer: bytes) -> None:
    async with served() as here:
        here.answers["/"] = answer
        assert "could not be fetched" in await refusal(here.hosts(), here.url("/"))


async def test_slow_host_times_out() -> None:
    async with served() as here:
        hosts = here.hosts(seconds=0.2)
        assert "within 0.2 s" in await refusal(hosts, here.url("/slow"))


async def test_unreachable_host_is_a_client_error() -> None:
    async with served() as here:
        url = here.url("/")
    assert "could not be fetched" in await refusal(here.hosts(), url)


@pytest.mark.parametrize("address", [
    "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1",
    "169.254.169.254", "100.64.0.1", "224.0.0.1", "255.255.255.255", "240.0.0.1", "::1", "::",
    "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "::ffff:127.0.0.1",
    "::ffff:10.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1", "64:ff9b::a00:1",
    "2002:7f00:1::", "2002:a00:1::", "2001:0:1::1", "2001:db8::1", "198.18.0.1", "192.0.2.1",
    "localhost", "", "1.2.3", "0x7f000001",
])  # fmt: skip
def test_private_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "93.184.216.34", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)
