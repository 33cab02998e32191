"""The two load generators, neither of them Swell's own: `vllm bench serve`, and wrk."""

import json
import queue
import random
import shutil
import socket
import subprocess
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

from tokenizers import Tokenizer

from benchmarks.versus.cases import BenchLoad, WrkLoad
from benchmarks.versus.servers import MODEL_NAME

_WORKER = Path(__file__).with_name("bench_worker.py")
_WRK_SCRIPT = Path(__file__).with_name("completions.lua")
_PROMPTS = 512
_RUN_SECONDS = 300
_WORKER_START_SECONDS = 120
_RESERVED_TOKENS = 2
"""The tokenizer's first tokens are special ones, which no prompt holds."""


class LoadFailed(Exception):
    """A load generator failed, or requests of it did; the message says what it printed."""


class BenchWorker:
    """`vllm bench serve` in its own environment, started once, as a context manager."""

    def __init__(self, python: Path) -> None:
        self._python = python
        self._answers: queue.Queue[str] = queue.Queue()

    def __enter__(self) -> "BenchWorker":
        self._log = tempfile.TemporaryFile(mode="w+")
        self._process = subprocess.Popen(
            [str(self._python), str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self._answer(_WORKER_START_SECONDS)
        except BaseException:
            self._end()
            raise
        return self

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _answer(self, timeout: float) -> dict[str, float]:
        try:
            line = self._answers.get(timeout=timeout)
        except queue.Empty:
            raise LoadFailed(f"vllm bench serve gave no answer in {timeout} s") from None
        answer = json.loads(line) if line else {"error": "it ended"}
        if "error" in answer:
            self._log.seek(0)
            raise LoadFailed(f"vllm bench serve: {answer['error']}\n{self._log.read()[-3000:]}")
        return dict(answer)

    def run(self, load: BenchLoad, url: str, model: Path, seed: int) -> dict[str, float]:
        """Send a load and return the numbers of the tool's result file.

        Raises:
            LoadFailed: not every request was answered in full.
        """
        arguments = [
            "--backend", "openai", "--base-url", url,
            "--model", MODEL_NAME, "--tokenizer", str(model),
            "--dataset-name", "random",
            "--random-input-len", str(load.prompt), "--random-output-len", str(load.output),
            "--num-prompts", str(load.requests), "--max-concurrency", str(load.streams),
            "--ignore-eos", "--seed", str(seed), "--disable-tqdm",
        ]  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        answer = self._answer(_RUN_SECONDS)
        generated = int(answer["total_output_tokens"])
        if answer["completed"] != load.requests or generated < load.requests * load.output:
            raise LoadFailed(f"{answer['completed']} requests with {generated} tokens: {answer}")
        return answer

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._log.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()


def run_wrk(load: WrkLoad, url: str, model: Path, seed: int) -> dict[str, float]:
    """Send completions of fresh prompts with wrk and return its rates.

    The tokens of streams that are not over when the time is are counted by the bytes that came
    of them, at the bytes per stream of those that are over. wrk knows the bytes of bodies and of
    the whole connection, so one stream is read in the raw first to learn how these compare.

    Raises:
        LoadFailed: wrk is not installed, or answers were not 200.
    """
    program = shutil.which("wrk")
    if program is None:
        raise LoadFailed("wrk is not installed (Debian: apt install wrk)")
    prompts = random_prompts(model, load.prompt, seed)
    overhead = _bytes_per_body_byte(url, completion_body(prompts[0], load))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as bodies:
        bodies.writelines(f"{completion_body(each, load)}\n" for each in prompts)
        bodies.flush()
        command = [
            program, "-t1", f"-c{load.connections}", f"-d{load.seconds}s", "--timeout", "60s",
            "-s", str(_WRK_SCRIPT), f"{url}/v1/completions",
            "--", bodies.name,
        ]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_RUN_SECONDS, check=False
        )
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not found:
        raise LoadFailed(f"wrk ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    counts: dict[str, float] = json.loads(found[0].removeprefix("RESULT "))
    if counts["failed"] or not counts["requests"]:
        raise LoadFailed(f"not all of wrk's requests were answered with 200:\n{done.stdout}")
    seconds = counts["microseconds"] / 1e6
    per_request = overhead * counts["body_bytes"] / counts["requests"]
    return {
        **counts,
        "requests_per_second": counts["requests"] / seconds,
        "tokens_per_second": counts["bytes"] / per_request * load.tokens / seconds,
    }


def completion_body(prompt: str, load: WrkLoad) -> str:
    """Return the JSON of one request."""
    return json.dumps(
        {
            "model": MODEL_NAME,
            "prompt": prompt,
            "max_tokens": load.tokens,
            "ignore_eos": True,
            "stream": load.stream,
        }
    )


def _bytes_per_body_byte(url: str, body: str) -> float:
    """Return how many bytes one answer takes on the wire for each byte of its body."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((address.hostname, address.port), _RUN_SECONDS) as connection:
        connection.sendall(f"{head}{body}".encode())
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    fields, _, content = received.partition(b"\r\n\r\n")
    if b" 200 " not in fields.splitlines()[0]:
        raise LoadFailed(f"the server answered {received[:500]!r}")
    if b"transfer-encoding: chunked" not in fields.lower():
        return len(received) / len(content)
    size = 0
    while content:
        length, _, content = content.partition(b"\r\n")
        size += int(length, 16)
        content = content[int(length, 16) + 2 :]
    return len(received) / size


def random_prompts(model: Path, length: int, seed: int) -> list[str]:
    """Return texts of about so many random tokens, without line breaks, quotes or backslashes."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    draw = random.Random(seed)
    vocab_size = tokenizer.get_vocab_size()
    prompts: list[str] = []
    while len(prompts) < _PROMPTS:
        ids = [draw.randrange(_RESERVED_TOKENS, vocab_size) for _ in range(length)]
        text = "".join(c for c in tokenizer.decode(ids) if c.isalpha() or c == " ")
        cut = tokenizer.encode(text, add_special_tokens=False)
        end = cut.offsets[min(length, len(cut)) - 1][1]
        prompts.append(text[:end])
    return prompts
