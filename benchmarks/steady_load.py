"""Clients that send one request after the other while something else goes on, and count."""

import json
import threading
import urllib.request

MODEL = "swell-shakespeare"

PATIENCE = 60.0
"""Seconds after which a client gives up."""


class Load:
    """Clients that send requests one after the other, each on a connection of its own."""

    def __init__(self, url: str, clients: int) -> None:
        self.answered = 0
        self.failures: list[str] = []
        self._url = url
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(clients)]

    def _run(self, seed: int) -> None:
        while not self._over.is_set():
            try:
                ask(self._url, 60, seed)
            except (OSError, ValueError) as error:
                self.failures.append(repr(error))
                self._over.wait(0.1)
            else:
                self.answered += 1

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)


def ask(url: str, tokens: int, seed: int, rank: int | None = None) -> None:
    """Send one request, for any engine or that of a rank, and wait for its answer.

    Raises:
        OSError: it was not answered.
        ValueError: it was answered wrongly.
    """
    body = {"model": MODEL, "prompt": f"Act {seed}", "max_tokens": tokens, "seed": seed}
    data = json.dumps({**body, "ignore_eos": True}).encode()
    headers = {"Content-Type": "application/json"}
    if rank is not None:
        headers["X-data-parallel-rank"] = str(rank)
    request = urllib.request.Request(f"{url}/v1/completions", data, headers)
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        told = json.loads(answer.read())["usage"]["completion_tokens"]
    if told != tokens:
        raise ValueError(f"{told} of {tokens} tokens")
