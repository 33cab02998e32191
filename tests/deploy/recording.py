"""Series of a running stack in promtool's format: scraped, stretched in time, and stored."""

import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import yaml

from tests.deploy.test_chart import CHART
from tests.support.metrics import scrape

FOLDER = Path(__file__).with_name("recorded")
STRETCH = 30
"""Seconds per recorded second: alerts take minutes, recordings need not."""
AGES = ("swell_engine_missing_seconds",)
"""Age metrics of missing components, which are stretched like time."""
SILENCES = ("swell_stats_age_seconds", "swell_coordinator_silence_seconds")
"""Age metrics of at most seconds in normal operation: only the part above `PAUSE` is stretched."""
PAUSE = 5.0

ALERTS = (CHART / "files" / "alerts.yaml").read_text(encoding="utf-8")
ASKED = set(re.findall(r"\bswell_\w+", ALERTS))
"""Names of the metrics that the alerts use."""
_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


def samples(text: str) -> Iterator[tuple[str, str, float]]:
    """Yield (metric, labels, value) of the samples of /metrics that the alerts use."""
    for metric, labels, value in _SAMPLE.findall(text):
        late = not metric.endswith("_bucket") or 'le="2.5"' in labels
        if metric in ASKED and late and not re.search(r'endpoint="(?!/v1/)', labels):
            yield metric, labels, round(stretched(metric, float(value)), 2)


def stretched(metric: str, value: float) -> float:
    """Return a value as it would be after the stretched time."""
    if metric in AGES:
        return STRETCH * value
    if metric in SILENCES and value > PAUSE:
        return PAUSE + STRETCH * (value - PAUSE)
    return value


def told(values: Sequence[float | None]) -> str:
    """Encode values in promtool's notation, compressing equal steps; None is a missing sample."""
    words: list[str] = []
    at = 0
    while at < len(values):
        end = at + 1
        step = _step(values, at)
        while step is not None and _step(values, end - 1) == step:
            end += 1
        first = values[at]
        if first is None:
            words.append(f"_x{end - at}")
        elif end - at > 2 or step == 0:
            words.append(f"{_plain(first)}{_sign(step)}x{end - at - 1}")
        else:
            end = at + 1
            words.append(_plain(first))
        at = end
    return " ".join(words)


def _step(values: Sequence[float | None], at: int) -> float | None:
    """Return the difference to the next value; None if either is missing."""
    if at + 1 == len(values):
        return None
    here, there = values[at], values[at + 1]
    if here is None or there is None:
        return 0.0 if here is there else None
    return round(there - here, 2)


def _plain(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _sign(step: float | None) -> str:
    return "" if not step else f"{'-' if step < 0 else '+'}{_plain(abs(step))}"


class Recorded(NamedTuple):
    """The recording of a state."""

    story: str
    marks: dict[str, int]
    """Indices of samples at which an event had happened, by name."""
    series: dict[str, str]

    @classmethod
    def read(cls, state: str) -> "Recorded":
        text = (FOLDER / f"{state}.yaml").read_text(encoding="utf-8")
        return cls(**yaml.load(text, yaml.BaseLoader))

    def write(self, state: str) -> None:
        FOLDER.mkdir(exist_ok=True)
        text = yaml.safe_dump(self._asdict(), sort_keys=False, width=10**6)
        (FOLDER / f"{state}.yaml").write_text(text, encoding="utf-8")


class Recorder:
    """Scrapes front ends once a second until it is stopped."""

    def __init__(self, targets: dict[str, str]) -> None:
        self.targets = targets
        """URLs by instance."""
        self.marks: dict[str, int] = {}
        self._found: dict[str, dict[int, float]] = {}
        self._count = 0

    def _scrape(self) -> None:
        for instance, url in self.targets.items():
            try:
                text = scrape(url)
            except (AssertionError, OSError):
                continue  # Prometheus would have no samples either
            for metric, labels, value in samples(text):
                known = ",".join(filter(None, ('job="swell"', f'instance="{instance}"', labels)))
                series = f"{metric}{{{known}}}"
                self._found.setdefault(series, {})[self._count] = value
        self._count += 1

    @contextmanager
    def running(self) -> Iterator[None]:
        """Scrape until the block ends."""
        over = threading.Event()

        def run() -> None:
            began = time.monotonic()
            while not over.wait(max(0.0, began + self._count - time.monotonic())):
                self._scrape()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def goes_on(self, count: int) -> None:
        """Wait for this many more samples."""
        end = self._count + count
        while self._count < end:
            time.sleep(0.05)

    def mark(self, name: str) -> None:
        """Name the newest sample."""
        self.marks[name] = self._count - 1

    def recorded(self, story: str) -> Recorded:
        """Return the recording, with a description of the state."""
        series = {
            name: told([values.get(at) for at in range(self._count)])
            for name, values in sorted(self._found.items())
        }
        return Recorded(story, self.marks, series)
