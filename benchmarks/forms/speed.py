"""Memory and tokens per second of a server with one form of a model, this one's or llama.cpp's."""

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from benchmarks.forms.stored import Form
from benchmarks.versus.servers import RunningServer, ServerCommand, free_port, swell_command

THREADS = 2
ROWS = (1, 4, 16)
_LENGTH = 512
"""Tokens that each of the most streams has room for, on both sides."""
_CACHE_BYTES = 192 << 20
"""For the KV cache; llama.cpp's takes this much for `_LENGTH` tokens of 16 streams of SmolLM2."""


class Visit(NamedTuple):
    """What one start of a server gave."""

    resident_mb: float
    rates: dict[int, float]
    """Output tokens per second by the number of streams."""


def visit(form: Form, llama_server: Path | None, tokens: int, seed: int) -> Visit:
    """Start a server, measure it, and stop it.

    Args:
        form: what it serves.
        llama_server: llama.cpp's program; None for `swell serve`.
        tokens: length of each answer.
        seed: differs between visits, so that no prompt comes again.
    """
    port = free_port()
    command = _swell(form, port) if llama_server is None else _llama(form, llama_server, port)
    with RunningServer(command, port) as server:
        _rate(server.url, 4, 8, seed)
        rates = {rows: _rate(server.url, rows, tokens, seed + rows) for rows in ROWS}
        return Visit(server.resident_mb(), rates)


def _swell(form: Form, port: int) -> ServerCommand:
    extra = [
        "--max-model-len", str(_LENGTH), "--kv-cache-memory-bytes", str(_CACHE_BYTES),
        "--api-server-count", "1", "--kv-cache-dtype", form.kv_cache_dtype,
    ]  # fmt: skip
    return swell_command(form.path, 1, port, quantization=form.quantization, extra=extra)


def _llama(form: Form, program: Path, port: int) -> ServerCommand:
    arguments = [
        str(program), "--model", str(form.path), "--host", "127.0.0.1", "--port", str(port),
        "--threads", str(THREADS), "--threads-batch", str(THREADS),
        "--parallel", str(max(ROWS)), "--ctx-size", str(max(ROWS) * _LENGTH),
        "--cache-ram", "0", "--no-webui",
    ]  # fmt: skip
    return ServerCommand(arguments, {}, "/health")


def _rate(url: str, rows: int, tokens: int, seed: int) -> float:
    """Return the output tokens per second of so many requests at once, their prompts included."""
    began = time.perf_counter()
    with ThreadPoolExecutor(rows) as pool:
        counts = list(pool.map(lambda row: _complete(url, tokens, seed * 100 + row), range(rows)))
    return sum(counts) / (time.perf_counter() - began)


def _complete(url: str, tokens: int, number: int) -> int:
    """Return how many tokens the answer has."""
    body = {
        "model": "bench",
        "prompt": f"{number} is the number of a story. It is about a dog who lives by the sea and",
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        url + "/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        count: int = json.load(answer)["usage"]["completion_tokens"]
    return count
