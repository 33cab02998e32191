"""Which sequences take turns, so that nobody makes steps much longer for others.

Two kinds of *parties* share steps: requests of clients, which may be thousands of sequences each,
and tenants. While others decode, the rows of a party may add only a part to what a step costs
without them; its sequences take turns then, those first that have waited longest. What rows cost is
measured (`engine.scheduler.step_costs`), masks of grammars included. A row that costs more than
the party's part of one step is saved up for, as in deficit round robin (Shreedhar and Varghese,
1996).

Whoever is alone is not held, and nobody gets fewer rows than the smallest of the others has. The
first sequence of a request computes its prompt freely, those after it share the request's part.
"""

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter

from engine.scheduler.fairness import Shares
from engine.scheduler.request import Request
from engine.scheduler.step_costs import StepCosts
from engine.scheduler.tally import add_one, take_one

_COSTLY_US = 100
"""Masks count from this many microseconds on."""

_group = attrgetter("group")
_tenant = attrgetter("tenant")
_last_turn = attrgetter("last_turn")


class Parties:
    """One kind of parties, and what each may still have in the step that is being planned.

    Args:
        key: says which party a sequence belongs to.
        part: what a party may add to a step, as a part of what it costs without.
    """

    def __init__(self, key: Callable[[Request], int], costs: StepCosts, part: float) -> None:
        self._key = key
        self._costs = costs
        self._part = part
        self._credit: dict[int, float] = {}
        """Rows that each may have: what it was given in this step, and what it saved."""
        self._given: set[int] = set()
        self._saving: set[int] = set()
        """Parties with sequences that are held: what is left is for the next of these."""
        self._mixing: set[int] = set()
        """Parties that have prompt tokens in this step: what any cost is taken from them."""
        self._planned = 0.0
        self._ready: Collection[int] = ()

    def free(self) -> None:
        """Begin a step in which nobody is limited."""
        self._ready = ()
        self._given.clear()
        self._credit.clear()
        self._saving.clear()
        self._mixing.clear()

    def hold(
        self, ready: Sequence[Request], weights: dict[int, float], turn: int, *, alone: bool = False
    ) -> set[int]:
        """Begin a step; return the ids of the sequences that are not decoded in it.

        Args:
            ready: the sequences that could be decoded.
            weights: by id what each costs, in rows, where that is not 1.
            turn: number of the step.
            alone: whether a party is limited even if no other is ready.
        """
        parties: dict[int, list[Request]] = {}
        for request in ready:
            parties.setdefault(self._key(request), []).append(request)
        self._begin(parties)
        wants = {
            party: sum([weights.get(each.id, 1.0) for each in members])
            for party, members in parties.items()
        }
        smallest_first = sorted(parties, key=wants.__getitem__)
        if len(parties) == 1 and not alone:
            self._planned = wants[smallest_first[0]]
            return set()
        held: set[int] = set()
        for place, party in enumerate(smallest_first):
            smallest_other = smallest_first[:1] if place else smallest_first[1:2]
            least = wants[smallest_other[0]] if smallest_other else 1.0
            credit, members = self._has(party, least), parties[party]
            if wants[party] > credit:
                members = _next_turns(members, weights, credit)
                if not members and not smallest_other:
                    members = parties[party][:1]  # rather than a step of nobody
                for each in members:
                    each.last_turn = turn
                held.update({each.id for each in parties[party]} - {each.id for each in members})
                self._saving.add(party)
            granted = sum([weights.get(each.id, 1.0) for each in members])
            self._credit[party] -= granted
            self._planned += granted
        return held

    def tokens(self, request: Request) -> int:
        """Return how many prompt tokens may be computed now for the party of a sequence.

        A party that would spend most of its part on having any of them at all saves up.
        """
        if not self._limits(request):
            return sys.maxsize
        party = self._key(request)
        if party in self._saving:
            return 0
        mixed = self._mixed(party)
        credit = self._has(party) - 1 - mixed
        if mixed and credit < mixed:
            self._saving.add(party)
            return 0
        return max(0, int(credit / self._costs.prefill))

    def prefill(self, request: Request, tokens: int) -> None:
        """Count prompt tokens of a sequence that are computed."""
        party = self._key(request)
        self.take(request, 1 + self._mixed(party) + tokens * self._costs.prefill)
        self._mixing.add(party)

    def rows(self, request: Request) -> int:
        """Return how many rows the party of a sequence may have beside its decodes."""
        if not self._limits(request):
            return sys.maxsize
        return max(0, int(self._has(self._key(request))))

    def take(self, request: Request, rows: float) -> None:
        """Count what is planned for a sequence beside its decode."""
        if self._limits(request):
            self._has(self._key(request))
            self._credit[self._key(request)] -= rows

    def _limits(self, request: Request) -> bool:
        """Whether sequences of other parties are decoded in this step."""
        return len(self._ready) > (self._key(request) in self._ready)

    def _begin(self, ready: Collection[int]) -> None:
        least = 1.0 + self._costs.prefill
        self._credit = {
            party: self._credit[party] if party in self._saving else min(self._credit[party], least)
            for party in self._given
        }
        self._ready = ready
        self._planned = 0.0
        self._given.clear()
        self._saving.clear()
        self._mixing.clear()

    def _mixed(self, party: int) -> float:
        """Return what prompt tokens of a party cost for being the first ones of it in a step."""
        return 0.0 if party in self._mixing else self._costs.mixed

    def _has(self, party: int, least: float = 0.0) -> float:
        """Return what a party may have; once a step it is given its part, or so many rows."""
        if party not in self._given:
            self._given.add(party)
            part = self._part * (self._costs.base + self._planned)
            self._credit[party] = self._credit.get(party, 0.0) + max(part, least)
        return self._credit[party]


def _next_turns(members: list[Request], weights: dict[int, float], credit: float) -> list[Request]:
    """Return the sequences of a party that have waited longest, as many as there is credit for."""
    running: list[Request] = []
    for request in sorted(members, key=_last_turn):
        credit -= weights.get(request.id, 1.0)
        if credit < 0:
            break
        running.append(request)
    return running


class Turns:
    """Limits requests and tenants in each step.

    Args:
        costs: what steps take.
        slowdown: how many times as long a party may make steps for others; None: any.
    """

    def __init__(self, shares: Shares, costs: StepCosts, slowdown: float | None) -> None:
        self._shares = shares
        self._costs = costs
        self._part = None if slowdown is None else slowdown - 1
        self._groups = Parties(_group, costs, self._part or 0.0)
        self._tenants = Parties(_tenant, costs, self._part or 0.0)
        self._running: dict[int, int] = {}
        """By group: how many of its sequences run."""
        self._num_followers = 0
        """Sequences that are here beside the first of their requests."""
        self._costly: dict[int, int] = {}
        """By id: microseconds of the newest mask."""
        self._turn = 0

    # -- who is here -----------------------------------------------------------------------------

    def come(self, request: Request) -> None:
        """A sequence has arrived."""
        self._num_followers += not request.leads

    def leave(self, request: Request) -> None:
        """A sequence has ended."""
        self._num_followers -= not request.leads

    def start(self, request: Request) -> None:
        """A sequence runs now."""
        add_one(self._running, request.group)

    def stop(self, request: Request) -> None:
        """A sequence runs no longer."""
        take_one(self._running, request.group)
        self._costly.pop(request.id, None)

    def masked(self, request: Request, mask_us: int) -> None:
        """The newest masks of a running sequence took this long; 0 if not long."""
        mask_us = max(mask_us, self._costly.pop(request.id, 0) // 2)
        if mask_us >= _COSTLY_US:
            self._costly[request.id] = mask_us

    @property
    def any_costly(self) -> bool:
        """Whether the masks of a sequence took long."""
        return bool(self._costly)

    @property
    def most_beside_others(self) -> int:
        """How many sequences of a group may be decoded in a step beside one of others."""
        return sys.maxsize if self._part is None else max(1, int(self._part * self._costs.base))

    def crowds(self) -> Collection[int]:
        """Return the groups of which as many sequences run as can be decoded beside others."""
        if not self._num_followers:
            return ()
        most = self.most_beside_others
        return {group for group, running in self._running.items() if running >= most > 1}

    # -- one step --------------------------------------------------------------------------------

    def begin(self, ready: Sequence[Request]) -> Collection[int]:
        """Begin a step; return the ids of the ready sequences that are not decoded in it."""
        self._turn += 1
        limited = self._part is not None
        weights = {id: 1 + self._costs.of_masks(us) for id, us in self._costly.items()}
        held: set[int] = set()
        if limited and (self._num_followers or self._costly):
            held = self._groups.hold(ready, weights, self._turn)
        else:
            self._groups.free()
        if limited and self._shares.contended:
            left = [each for each in ready if each.id not in held] if held else ready
            held |= self._tenants.hold(left, weights, self._turn, alone=True)
        else:
            self._tenants.free()
        return held

    def tokens(self, request: Request) -> int:
        """Return how many of its prompt tokens a sequence may have computed."""
        return sys.maxsize if request.leads else self._groups.tokens(request)

    def prefill(self, request: Request, tokens: int) -> None:
        """This many prompt tokens of a sequence are computed."""
        if not request.leads:
            self._groups.prefill(request, tokens)

    def drafts(self, request: Request, wanted: int) -> int:
        """Take up to so many rows for drafts of a sequence that is decoded; return how many."""
        count = min(wanted, self._groups.rows(request), self._tenants.rows(request))
        self._groups.take(request, count)
        self._tenants.take(request, count)
        return count

    def part_of_prefill(self, rows: int) -> int:
        """Return the prompt tokens that a tenant may have in a step of so many decodes, always."""
        if self._part is None:
            return sys.maxsize
        return max(1, int(self._part * (self._costs.base + rows) / self._costs.prefill))

    def mixed_tokens(self, rows: int) -> int:
        """Return what any prompt tokens cost beside so many decodes, in prompt tokens."""
        if self._part is None or not rows:
            return 0
        return int(self._costs.mixed / self._costs.prefill)

    def check_integrity(self, present: Iterable[Request], running: Collection[Request]) -> None:
        """Compare with all requests there are, and with those that run.

        Raises:
            AssertionError: something is counted wrongly.
        """
        assert self._num_followers == sum(not each.leads for each in present)
        assert self._running == Counter(each.group for each in running)
        assert self._costly.keys() <= {each.id for each in running}
