"""Operators' cluster-wide requests, and the adapters of the cluster. No I/O.

An adapter is loaded in two phases. First all engines read it; requests can name it only once every
ready engine has reported that it is loaded. Unloading goes in the opposite order: front ends stop
accepting requests for the adapter; once none of them has such a request in flight, engines drop it.
An adapter that replaces one of the same name is a separate entry: requests already running finish
with the old one.

The decided state is one versioned table, which engines and front ends keep. A restarted coordinator
has no table and continues from the newest one that registering members bring.
"""

from collections.abc import Collection

from msgspec.structs import replace

from engine.shared.messages import (
    ASLEEP_TAGS,
    AdapterEntry,
    AdapterLoadResult,
    AdapterOutcome,
    AdapterRequest,
    AdaptersInUse,
    AdaptersView,
    AdapterTable,
    FleetOrder,
    FleetRequest,
)

MAX_ENTRIES = 1024
_MAX_OUTCOMES = 64
"""Outcomes kept to answer repeated requests."""

Process = tuple[int, int]
"""Rank (engine) or index (front end) of a member, and its incarnation."""


class AdapterRegistry:
    """The adapter table of one cluster, and how far engines and front ends have applied it."""

    def __init__(self) -> None:
        self.table: AdapterTable | None = None
        """None until a member brings one: engines have no adapters, or none has registered."""
        self.held: dict[Process, dict[int, AdapterLoadResult]] = {}
        """Last report of each engine, by serial."""
        self.known: dict[Process, AdaptersInUse] = {}
        """Last report of each front end."""
        self._left_at: dict[int, int] = {}
        """Revision in which an entry entered the "leaving" state, by serial."""
        self._awaited: dict[int, int] = {}
        """Tickets of requests that complete once all front ends know this revision."""
        self._outcomes: dict[int, AdapterOutcome] = {}
        self._last_serial = 0
        """Highest serial assigned. Serials are never reused, so reports are unambiguous."""
        self._engines: frozenset[Process] = frozenset()
        self._front_ends: frozenset[Process] = frozenset()

    # -- reports of members ----------------------------------------------------------------------

    def adopt_newer(self, table: AdapterTable | None) -> bool:
        """Adopt a registering member's table if it is newer; return whether it was."""
        if table is None or (self.table is not None and table.revision <= self.table.revision):
            return False
        self.table = table
        for entry in table.entries:
            self._last_serial = max(self._last_serial, entry.serial)
            if entry.state == "leaving":
                self._left_at.setdefault(entry.serial, table.revision)
        return True

    def versions(self, engine: Process) -> list[str]:
        """Return the versions that an engine has reported as loaded."""
        held = self.held.get(engine, {}).values()
        return sorted({each.version for each in held if each.version})

    def handle_request(self, request: AdapterRequest) -> None:
        """Handle a load or unload request. Idempotent: senders repeat it until it is answered."""
        if (
            self.table is None
            or request.ticket in self._outcomes
            or request.ticket in self._awaited
        ):
            return
        if request.path is None:
            states = {entry.state for entry in self.table.entries if entry.name == request.name}
            if "serving" in states:
                self._awaited[request.ticket] = self.table.revision + 1
                self._leave({self.table.serving[request.name].serial})
            elif "leaving" in states:
                self._awaited[request.ticket] = self.table.revision
            else:
                self._answer(request.ticket, 404, f"The adapter {request.name!r} cannot be found.")
        else:
            self._load(self.table, request, request.path)

    def _load(self, table: AdapterTable, request: AdapterRequest, path: str) -> None:
        for entry in table.entries:
            if entry.ticket == request.ticket:
                if entry.state != "loading":
                    self._awaited[request.ticket] = table.revision
                return
        name, serving = request.name, table.serving
        if any(entry.name == name and entry.state == "loading" for entry in table.entries):
            self._answer(request.ticket, 400, f"The adapter {name!r} is being loaded already.")
        elif name in serving and not request.in_place:
            text = f"The adapter {name!r} has already been loaded; load_inplace replaces it."
            self._answer(request.ticket, 400, text)
        elif len(table.entries) >= MAX_ENTRIES:
            self._answer(request.ticket, 400, f"There are {MAX_ENTRIES} adapters already.")
        elif not self._engines:
            self._answer(request.ticket, 503, "No engine can load an adapter now; try again.")
        else:
            self._last_serial = 1 + max(self._last_serial, table.revision)
            entry = AdapterEntry(self._last_serial, name, path, ticket=request.ticket)
            self._change([*table.entries, entry])

    # -- progress --------------------------------------------------------------------------------

    def advance(self, engines: Collection[Process], front_ends: Collection[Process]) -> bool:
        """Advance all entries as far as the reports allow; return whether the view changed.

        Args:
            engines: the ready engines.
            front_ends: all registered front ends.
        """
        self._engines, self._front_ends = frozenset(engines), frozenset(front_ends)
        self.known = {each: self.known[each] for each in front_ends if each in self.known}
        if self.table is None:
            return False
        before = self.table, len(self._outcomes), len(self._awaited)
        for entry in self.table.entries:
            if entry.state == "loading" and self._engines:
                self._check_loading(entry)
        known = [self.known.get(front_end) for front_end in self._front_ends]
        # Engines drop entries that no front end has requests for.
        removed = set()
        for entry in self.table.entries:
            since = self._left_at.get(entry.serial, 0)
            if entry.state == "leaving" and not any(
                each is None or each.revision < since or entry.version in each.versions
                for each in known
            ):
                removed.add(entry.serial)
        if removed:
            self._change([entry for entry in self.table.entries if entry.serial not in removed])
            for serial in removed:
                self._left_at.pop(serial, None)
        settled = min((-1 if each is None else each.revision for each in known), default=None)
        for ticket, revision in list(self._awaited.items()):
            if settled is None or settled >= revision:
                del self._awaited[ticket]
                self._answer(ticket, 200, "")
        return (self.table, len(self._outcomes), len(self._awaited)) != before

    def _check_loading(self, entry: AdapterEntry) -> None:
        """Start serving an entry that all engines have loaded; drop one that any cannot load."""
        found = {engine: self.held.get(engine, {}).get(entry.serial) for engine in self._engines}
        for (rank, _), held in sorted(found.items()):
            if held is not None and held.error:
                self._drop(entry, f"{held.error} (engine {rank})")
                return
        versions = {held.version for held in found.values() if held is not None}
        if len(versions) > 1:
            self._drop(entry, "engines read different files there")
        elif None not in found.values():
            assert self.table is not None
            before = self.table.serving.get(entry.name)
            if before is not None:
                self._leave({before.serial})
            serving = replace(entry, version=versions.pop(), state="serving")
            self._change([serving if e.serial == entry.serial else e for e in self.table.entries])
            if entry.ticket:
                self._awaited[entry.ticket] = self.table.revision

    def _drop(self, entry: AdapterEntry, reason: str) -> None:
        assert self.table is not None
        self._change([each for each in self.table.entries if each.serial != entry.serial])
        self._answer(entry.ticket, 400, f"The adapter cannot be loaded: {reason}.")

    def _leave(self, serials: set[int]) -> None:
        assert self.table is not None
        entries = self.table.entries
        self._change([replace(e, state="leaving") if e.serial in serials else e for e in entries])
        self._left_at.update(dict.fromkeys(serials, self.table.revision))

    def _change(self, entries: list[AdapterEntry]) -> None:
        assert self.table is not None
        self.table = AdapterTable(self.table.revision + 1, entries)

    def _answer(self, ticket: int, status: int, reason: str) -> None:
        if ticket:
            self._outcomes[ticket] = AdapterOutcome(ticket, status, reason)
        while len(self._outcomes) > _MAX_OUTCOMES:
            del self._outcomes[next(iter(self._outcomes))]

    @property
    def view(self) -> AdaptersView | None:
        """What is published to front ends; None before any table is known."""
        if self.table is None:
            return None
        return AdaptersView(self.table, list(self._outcomes.values()))


_MAX_TICKETS = 16
"""Number of handled tickets kept to recognize repeated requests."""


class FleetOrders:
    """The newest fleet order; a restarted coordinator learns it from registering members."""

    def __init__(self) -> None:
        self.order = FleetOrder(0)

    def adopt_newer(self, order: FleetOrder | None) -> bool:
        """Adopt a registering member's order if it is newer; return whether it was."""
        if order is None or order.revision <= self.order.revision:
            return False
        self.order = order
        return True

    def handle_request(self, request: FleetRequest) -> bool:
        """Apply an operator's request; return False if its ticket was already handled."""
        before = self.order
        if request.ticket in before.tickets:
            return False
        revision = before.revision + 1
        tickets = [*before.tickets, request.ticket][-_MAX_TICKETS:]
        after = replace(before, revision=revision, tickets=tickets)
        match request.action:
            case "pause":
                after = replace(after, pause=request.mode, pause_revision=revision)
            case "resume":
                after = replace(after, pause=None, pause_revision=revision)
            case "sleep":
                mode = "keep" if request.mode == "wait" else request.mode
                after = replace(
                    after,
                    sleep_level=request.level,
                    sleep_mode=mode,
                    woken=[],
                    sleep_revision=revision,
                )
            case "wake_up":
                woken = sorted({*before.woken, *(request.tags or ASLEEP_TAGS)})
                is_over = not before.sleep_level or set(woken) >= set(ASLEEP_TAGS)
                after = replace(
                    after,
                    sleep_level=None if is_over else before.sleep_level,
                    woken=[] if is_over else woken,
                    sleep_revision=revision,
                )
            case "weights":
                after = replace(after, weights=request.weights)
        self.order = after
        return True
