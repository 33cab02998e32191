"""Requests to upgrade to another protocol, which are never accepted."""

import asyncio
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from server.config import GuardConfig
from tests.server.http.test_http_protocol import connect, served
from tests.support.waiting import PATIENCE, until_async

UPGRADE = (
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n"
)
BODY = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
SIZED = b"POST /first HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n%s" % (
    UPGRADE,
    len(BODY),
    BODY,
)
CHUNKED = (
    b"POST /first HTTP/1.1\r\nHost: x\r\n%sTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"
    % (UPGRADE, len(BODY), BODY)
)
EMPTY = b"GET /empty HTTP/1.1\r\nHost: x\r\n%s\r\n" % UPGRADE
LAST = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the path and the body of a request, one line of JSON."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    assert b"upgrade" not in dict(scope["headers"])
    shown = msgspec.json.encode([scope["method"], scope["path"], body.decode()]) + b"\n"
    length = str(len(shown)).encode()
    headers = [(b"content-length", length), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": shown})


FIRST, NONE, END = (
    ["POST", "/first", BODY.decode()],
    ["GET", "/empty", ""],
    ["GET", "/last", ""],
)


@pytest.mark.parametrize(
    ("sent", "requests"),
    [
        (SIZED + LAST, [FIRST, END]),
        (CHUNKED + LAST, [FIRST, END]),
        (EMPTY + LAST, [NONE, END]),
        (SIZED + CHUNKED + EMPTY + SIZED + LAST, [FIRST, FIRST, NONE, FIRST, END]),
        (SIZED.replace(b"HTTP/1.1\r\nHost: x\r\nConn", b"HTTP/1.0\r\nHost: x\r\nConn"), [FIRST]),
        (
            SIZED.replace(b"h2c", b"websocket").replace(b", HTTP2-Settings", b"") + LAST,
            [FIRST, END],
        ),
    ],
    ids=["sized", "chunked", "no body", "pipelined", "HTTP/1.0", "websocket"],
)
@pytest.mark.parametrize("size", [1, 7, 100, 1 << 16])
async def test_body_after_upgrade_header_belongs_to_its_request(
    sent: bytes, requests: list[list[str]], size: int
) -> None:
    async with served(echo, GuardConfig()) as port:
        reader, writer = await connect(port)
        for start in range(0, len(sent), size):
            writer.write(sent[start : start + size])
            await writer.drain()
            await asyncio.sleep(0)
        answer = await reader.read()
        writer.close()
        lines = [line for line in answer.split(b"\n") if line.startswith(b"[")]
        assert [msgspec.json.decode(line) for line in lines] == requests
        assert answer.count(b"HTTP/1.1 200 ") == len(requests)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"CONNECT x:80 HTTP/1.1\r\nHost: x:80\r\n\r\n" + EMPTY, b"405"),
        (b"GET / HTTP/1.1\r\nX: %s\r\n%s\r\n" % (b"x" * 20000, UPGRADE), b"431"),
        (
            EMPTY.replace(b"\r\n\r\n", b"\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxy"),
            b"400",
        ),
        (CHUNKED.replace(b"Transfer", b"Content-Length: 3\r\nTransfer"), b"400"),
        (CHUNKED.replace(b"%x\r\n" % len(BODY), b"x\r\n"), b"400"),
    ],
    ids=["CONNECT", "large head", "two lengths", "two framings", "bad chunk"],
)
async def test_upgrade_header_does_not_change_refusals(sent: bytes, status: bytes) -> None:
    async with served(echo, GuardConfig()) as port:
        reader, writer = await connect(port)
        writer.write(sent)
        answer = await reader.read()
        writer.close()
        assert answer[9:12] == status
        assert answer.count(b"HTTP/1.1") <= 1


JAVA = """
import java.net.URI;
import java.net.http.*;
public class Post {
    public static void main(String[] arguments) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        for (int turn = 0; turn < 3; turn++) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(arguments[0]))
                .header("Content-Type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString("hello " + turn)).build();
            var answer = client.send(request, HttpResponse.BodyHandlers.ofString());
            System.out.print(answer.statusCode() + " " + answer.body());
        }
    }
}
"""

NODE = """
const http = require("http");
const url = process.argv[1];
const agent = new http.Agent({keepAlive: true, maxSockets: 1});
const post = turn => new Promise((done, failed) => {
    const headers = {"Connection": "Upgrade", "Upgrade": "h2c", "Content-Type": "application/json"};
    const request = http.request(url, {method: "POST", headers, agent}, async answer => {
        let text = "";
        for await (const piece of answer) text += piece;
        process.stdout.write(answer.statusCode + " " + text);
        done();
    });
    request.on("error", failed);
    request.end("hello " + turn);
});
(async () => {
    for (let turn = 0; turn < 2; turn++) await post(turn);
    const answer = await fetch(url, {method: "POST", body: "hello 2"});
    process.stdout.write(answer.status + " " + await answer.text());
})();
"""


def _java(url: str, directory: Path) -> list[str]:
    program = directory / "Post.java"
    program.write_text(JAVA)
    return ["java", "-XX:TieredStopAtLevel=1", str(program), url]


def _curl(url: str, directory: Path) -> list[str]:
    one = ["--http2", "-sS", "-w", "", "-o", "-", url]
    command = ["curl"]
    for turn in range(3):
        command += [*(["--next"] if turn else []), *one, "-d", f"hello {turn}"]
    return command


def _node(url: str, directory: Path) -> list[str]:
    return ["node", "-e", NODE, url]


@pytest.mark.parametrize("client", [_java, _curl, _node])
async def test_clients_offering_http2_are_answered_over_http1(client: Any, tmp_path: Path) -> None:
    program = client("", tmp_path)[0]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")

    async with served(echo, GuardConfig()) as port:
        command = client(f"http://127.0.0.1:{port}/first", tmp_path)
        process = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        async with asyncio.timeout(PATIENCE):
            output, _ = await process.communicate()
        lines = [line.removeprefix("200 ") for line in output.decode().splitlines()]
        expected = [["POST", "/first", f"hello {turn}"] for turn in range(3)]
        assert [msgspec.json.decode(line) for line in lines] == expected, output


NGINX = """
daemon off;
pid {directory}/nginx.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {directory};
    proxy_temp_path {directory};
    fastcgi_temp_path {directory};
    uwsgi_temp_path {directory};
    scgi_temp_path {directory};
    upstream server {{ server 127.0.0.1:{behind}; keepalive 4; }}
    map $http_upgrade $connection_upgrade {{ default upgrade; "" ""; }}
    server {{
        listen unix:{directory}/socket;
        location / {{
            proxy_pass http://server;
            proxy_http_version 1.1;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection $connection_upgrade;
        }}
        location /unbuffered {{
            proxy_pass http://127.0.0.1:{behind};
            proxy_request_buffering off;
            client_max_body_size 0;
        }}
    }}
}}
"""


needs_nginx = pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")


def accepts(path: Path) -> bool:
    """Return whether a process listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
        except OSError:
            return False
    return True


@asynccontextmanager
async def nginx(directory: Path, behind: int) -> AsyncIterator[str]:
    """Run nginx as a proxy of a port; yield the path of its socket.

    The socket exists before nginx listens on it, so wait for a successful connection.
    """
    settings, listening = directory / "nginx.conf", directory / "socket"
    settings.write_text(NGINX.format(directory=directory, behind=behind))
    process = await asyncio.create_subprocess_exec("nginx", "-c", str(settings))
    try:
        await until_async(lambda: accepts(listening), "nginx listens")
        yield str(listening)
    finally:
        process.terminate()
        await process.wait()


@needs_nginx
async def test_client_behind_default_nginx_gets_refusal_of_body(app: Any, tmp_path: Path) -> None:
    body = b"x" * (8 * GuardConfig().max_body_bytes)
    sent = (
        b"POST /unbuffered HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )

    async def renamed(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "path": "/v1/completions"}, receive, send)

    async with served(renamed, GuardConfig()) as port, nginx(tmp_path, port) as listening:
        for _ in range(5):
            reader, writer = await asyncio.open_unix_connection(listening)
            writer.write(sent)
            answer = await reader.readuntil(b"}}")
            assert answer.startswith(b"HTTP/1.1 413 ")
            assert b"body_too_large" in answer
            writer.close()


@needs_nginx
async def test_nginx_passing_upgrades_never_mixes_answers_of_clients(
    tmp_path: Path,
) -> None:
    async def exchange(listening: str, sent: bytes) -> list[str]:
        reader, writer = await asyncio.open_unix_connection(listening)
        writer.write(sent)
        answer = await reader.readuntil(b"]\n")
        writer.close()
        line: list[str] = msgspec.json.decode(answer.splitlines()[-1])
        return line

    async with served(echo, GuardConfig()) as port, nginx(tmp_path, port) as listening:
        for _ in range(5):
            assert await exchange(listening, SIZED) == FIRST
            assert await exchange(listening, LAST) == END
            assert await exchange(listening, CHUNKED) == FIRST
            assert await exchange(listening, EMPTY) == NONE
