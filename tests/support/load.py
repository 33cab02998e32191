"""Clients that keep a stack busy and check its answers."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.http import ADMIN_KEY, call, completion, fetch, ready_ranks
from tests.support.waiting import PATIENCE, until

ENOUGH = 50
"""Minimum number of answers during a load."""


class Load:
    """Clients that send requests one after the other and record the answers."""

    def __init__(self, url: str, clients: int, key: str = ADMIN_KEY) -> None:
        self.answers: dict[int, set[str]] = {}
        self.errors: list[str] = []
        self.count = 0
        self._target = (url, key)
        self._asked: dict[int, tuple[str, str]] = {}
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(clients)]

    def _run(self, seed: int) -> None:
        body = completion(f"Act {seed}", 60, seed=seed)
        while not self._over.is_set():
            url, key = target = self._target
            answer = fetch(f"{url}/v1/completions", body, key=key)
            self._asked[seed] = target
            if answer.status != 200:
                self.errors.append(repr(answer))
                continue
            choices = json.loads(answer.text)["choices"]
            # Releases differ in the fields of answers.
            outputs = [[each["index"], each["text"], each["finish_reason"]] for each in choices]
            self.answers.setdefault(seed, set()).add(json.dumps(outputs))
            self.count += 1

    @contextmanager
    def running(self) -> Iterator["Load"]:
        """Send requests until the block ends, and at least until `ENOUGH` are answered."""
        for thread in self._threads:
            thread.start()
        try:
            yield self
            until(lambda: self.count > ENOUGH or self.errors, "enough requests are answered")
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join(PATIENCE)

    def turn_to(self, url: str, key: str = ADMIN_KEY) -> None:
        """Redirect all clients to another URL and key; wait until none uses the old ones."""
        self._target = (url, key)
        until(
            lambda: self.errors or list(self._asked.values()) == [(url, key)] * len(self._threads),
            "all clients have been answered there",
        )

    def goes_on(self, requests: int = 30) -> None:
        """Wait until `requests` more requests are answered."""
        before = self.count
        until(lambda: self.count >= before + requests or self.errors, "the load goes on")

    def check(self) -> None:
        """Check that no request failed, and that equal requests always had equal answers."""
        first = "\n".join(self.errors[:3])
        assert not self.errors, f"{len(self.errors)} failures, the first of them:\n{first}"
        assert self.count > ENOUGH
        assert all(len(outputs) == 1 for outputs in self.answers.values()), "the same in every run"


def settle(url: str, size: int) -> dict[str, object]:
    """Wait until the supervisor and the coordinator agree on ranks 0 to size - 1."""
    status: dict[str, object] = {}

    def is_settled() -> bool:
        status.update(call(f"{url}/admin/scale"))
        return not status["busy"] and ready_ranks(url) == set(range(size))

    until(is_settled, f"{size} engines", interval=0.05)
    return status
