"""An engine's adapters: those of the cluster's table, and those that its requests still use.

Adapters are loaded in a background thread; `settled` collects the outcomes. An adapter that was
removed from the table is kept until the last request with it has ended.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

from engine.batch.executor import CannotDo
from engine.lora.adapter_config import BadAdapter
from engine.lora.store import AdapterStore
from engine.shared.config import LoraConfig
from engine.shared.messages import AdapterEntry, AdapterLoadResult, AdapterTable

logger = logging.getLogger(__name__)


class AdapterUser(Protocol):
    """Computes with loaded adapters: the scheduler's slots, or vLLM's executor."""

    def hold(self, version: str) -> None:
        """Accept requests with an adapter; idempotent.

        Raises:
            BadAdapter: it cannot be used.
        """

    def drop(self, version: str) -> None:
        """Forget an adapter that no request uses."""


@dataclass
class _Entry:
    """One entry of the table, and the outcome of loading it."""

    entry: AdapterEntry
    loading: "Future[str] | None"
    """Resolves to its version; None once the outcome is known."""
    outcome: AdapterLoadResult | None = None


@dataclass(eq=False)
class AdapterManager:
    """Synchronizes an engine's adapters with the cluster's table.

    Args:
        store: loads and stores them; None for an engine without adapters.
        user: is notified of the adapters that requests can use.
        is_used: returns whether any request uses an adapter.
        report: called with the table and its entries' outcomes whenever these change.
    """

    config: LoraConfig
    store: AdapterStore[Any] | None
    user: AdapterUser
    is_used: Callable[[str], bool]
    report: Callable[[AdapterTable, list[AdapterLoadResult]], None]

    def __post_init__(self) -> None:
        self._table = AdapterTable(-1)
        self._entries: dict[int, _Entry] = {}
        self.keeps_unlisted = False
        """Whether an adapter removed from the table is kept for unfinished requests."""

    # -- the table -------------------------------------------------------------------------------

    def take(self, table: AdapterTable) -> None:
        """Apply a table: load new entries, forget removed ones."""
        if self.store is None or table.revision < self._table.revision:
            return
        if table == self._table:
            return  # repeated
        self._table = table
        listed = {entry.serial: entry for entry in table.entries}
        for serial in self._entries.keys() - listed.keys():
            del self._entries[serial]
        for serial, entry in sorted(listed.items()):
            current = self._entries.get(serial)
            if current is not None and (current.entry.name, current.entry.path) == (
                entry.name,
                entry.path,
            ):
                current.entry = entry
            else:
                self._entries[serial] = self._start_loading(entry, self.store)
        self.sweep()
        self._report_outcomes()

    def _start_loading(self, entry: AdapterEntry, store: AdapterStore[Any]) -> _Entry:
        if entry.version and entry.version in store:
            return _Entry(entry, None, self._hold(entry, entry.version))
        others = sum(each.entry.state != "leaving" for each in self._entries.values())
        if entry.state != "leaving" and others >= self.config.max_held:
            error = f"there are {others} adapters already (--max-cpu-loras)"
            return _Entry(entry, None, AdapterLoadResult(entry.serial, error=error))
        root = self.config.lora_dir if entry.confined else None
        if entry.confined and root is None:
            error = "adapters can only be loaded from below --lora-dir, which is not set"
            return _Entry(entry, None, AdapterLoadResult(entry.serial, error=error))
        return _Entry(entry, store.load(entry.path, root))

    def settled(self) -> None:
        """Collect the outcomes of finished loads."""
        has_changed = False
        for entry in self._entries.values():
            if entry.loading is not None and entry.loading.done():
                entry.outcome = self._outcome(entry.entry, entry.loading)
                entry.loading = None
                has_changed = True
        self.sweep()
        if has_changed:
            self._report_outcomes()

    def _outcome(self, entry: AdapterEntry, loading: "Future[str]") -> AdapterLoadResult:
        try:
            version = loading.result()
            if entry.version and entry.version != version:
                raise BadAdapter("its files have changed since it was loaded: load it again")
        except BadAdapter as error:
            return _refused(entry, error)
        result = self._hold(entry, version)
        if not result.error:
            logger.info("adapter %s is loaded, version %s", entry.name, version)
        return result

    def _hold(self, entry: AdapterEntry, version: str) -> AdapterLoadResult:
        try:
            self.user.hold(version)
        except BadAdapter as error:
            return _refused(entry, error)
        return AdapterLoadResult(entry.serial, version)

    def wait(self) -> list[tuple[AdapterEntry, str]]:
        """Wait for all pending loads; return the entries that failed, with the reasons."""
        wait(entry.loading for entry in self._entries.values() if entry.loading is not None)
        self.settled()
        return [
            (entry.entry, entry.outcome.error)
            for entry in self._entries.values()
            if entry.outcome is not None and entry.outcome.error
        ]

    def _report_outcomes(self) -> None:
        outcomes = (entry.outcome for entry in self._entries.values())
        self.report(self._table, [outcome for outcome in outcomes if outcome is not None])

    def sweep(self) -> None:
        """Drop adapters that are not on the table and have no requests left."""
        if self.store is None:
            return
        listed = {entry.outcome.version for entry in self._entries.values() if entry.outcome}
        if any(entry.loading is not None for entry in self._entries.values()):
            return  # an entry being loaded may be the same adapter
        self.keeps_unlisted = False
        for version in self.store:
            if version in listed:
                continue
            if self.is_used(version):
                self.keeps_unlisted = True
                continue
            self.user.drop(version)
            self.store.drop(version)

    # -- queries ---------------------------------------------------------------------------------

    def versions(self) -> dict[str, str]:
        """Return the version of each adapter that requests can name."""
        return {
            entry.entry.name: entry.outcome.version
            for entry in self._entries.values()
            if entry.outcome is not None
            and entry.outcome.version
            and entry.entry.state != "leaving"
        }

    def version(self, name: str) -> str:
        """Return the version of an adapter that requests can name.

        Raises:
            CannotDo: there is no such adapter.
        """
        version = self.versions().get(name)
        if version is None:
            raise CannotDo(f"there is no adapter {name!r}")
        return version


def _refused(entry: AdapterEntry, error: BadAdapter) -> AdapterLoadResult:
    logger.error("adapter %s cannot be served: %s", entry.name, error)
    return AdapterLoadResult(entry.serial, error=str(error))
