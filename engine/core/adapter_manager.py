"""An engine's adapters: those of the cluster's table, and those that its requests still use.

Adapters are loaded in a background thread; `settled` collects the outcomes. An adapter that was
removed from the table is kept until the last request with it has ended.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from engine.batch.executor import CannotDo
from engine.lora.adapter_config import BadAdapter
from engine.lora.store import AdapterStore
from engine.scheduler.scheduler import Scheduler
from engine.shared.config import LoraConfig
from engine.shared.messages import AdapterEntry, AdapterLoad, AdapterLoadResult, AdapterTable

logger = logging.getLogger(__name__)


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
        scheduler: notified of the adapters that requests can use.
        report: called with the table and its entries' outcomes whenever these change.
    """

    config: LoraConfig
    store: AdapterStore[Any] | None
    scheduler: Scheduler
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
            self.scheduler.adapters.held.add(entry.version)
            return _Entry(entry, None, AdapterLoadResult(entry.serial, entry.version))
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
            logger.error("adapter %s cannot be served: %s", entry.name, error)
            return AdapterLoadResult(entry.serial, error=str(error))
        logger.info("adapter %s is loaded, version %s", entry.name, version)
        self.scheduler.adapters.held.add(version)
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
            if self.scheduler.uses_adapter(version):
                self.keeps_unlisted = True
                continue
            self.scheduler.adapters.drop(version)
            self.store.drop(version)

    # -- queries and pins ------------------------------------------------------------------------

    def load(self) -> AdapterLoad | None:
        """Return the adapters in use by steps; None if adapters are disabled."""
        if self.store is None:
            return None
        slots = self.scheduler.adapters
        return AdapterLoad(slots.residents, slots.running, self.scheduler.waiting_adapters)

    def versions(self) -> dict[str, str]:
        """Return the version of each adapter that requests can name."""
        return {
            entry.entry.name: entry.outcome.version
            for entry in self._entries.values()
            if entry.outcome is not None
            and entry.outcome.version
            and entry.entry.state != "leaving"
        }

    def pin(self, name: str) -> None:
        """Keep an adapter in its slot from its next request on.

        Raises:
            CannotDo: there is no such adapter, or no slot would be left for others.
        """
        if not self.scheduler.adapters.pin(self._version(name)):
            raise CannotDo("one slot has to stay for other adapters: raise --max-loras")

    def unpin(self, name: str) -> None:
        """Allow an adapter to be evicted from its slot again.

        Raises:
            CannotDo: there is no such adapter.
        """
        self.scheduler.adapters.unpin(self._version(name))

    def _version(self, name: str) -> str:
        version = self.versions().get(name)
        if version is None:
            raise CannotDo(f"there is no adapter {name!r}")
        return version
