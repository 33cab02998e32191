"""Serving on a Unix domain socket."""

import asyncio
import socket
from pathlib import Path

import httpx
import pytest
import uvicorn
import uvloop
from fastapi import FastAPI

from engine.shared.addresses import listen_unix
from server.config import GuardConfig
from server.http.listener import HttpServer
from server.http.protocol import limited_protocol
from tests.support.waiting import PATIENCE


def test_clients_are_served_on_a_unix_socket(app: FastAPI, tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    server = HttpServer(
        uvicorn.Config(app, http=limited_protocol(GuardConfig()), lifespan="off", loop="none"), 5.0
    )

    async def ask() -> httpx.Response:
        serving = asyncio.create_task(server.serve([listen_unix(path, 8)]))
        try:
            transport = httpx.AsyncHTTPTransport(uds=str(path))
            async with httpx.AsyncClient(
                transport=transport, base_url="http://api", timeout=PATIENCE
            ) as client:
                return await client.post("/v1/completions", json={"prompt": "hello"})
        finally:
            server.should_exit = True
            await serving

    answer = uvloop.run(ask())
    assert answer.json()["choices"][0]["text"] == "hello world"


def test_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    listen_unix(path, 1).close()
    with listen_unix(path, 1):
        with pytest.raises(OSError, match="in use"):
            listen_unix(path, 1)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_other_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "precious.txt"
    path.write_text("precious")
    with pytest.raises(FileExistsError, match="not a socket"):
        listen_unix(path, 1)
    assert path.read_text() == "precious"
