"""State machines of blocks offered and pulled between engines, under all link failures."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv.tiers import BlockName
from engine.kv.transfer_messages import checksum, pack
from engine.kv.transfer_offers import Offers
from engine.kv.transfer_pull import Pull

NAMES: list[BlockName] = [(0, bytes([n]) * 16) for n in range(12)]
SECONDS, PATIENCE, DEADLINE, WINDOW, MAX_BYTES = 30.0, 2.0, 20.0, 4, 1000


def pull_of(count: int, *, now: float = 0.0) -> Pull:
    return Pull(NAMES[:count], window=WINDOW, patience=PATIENCE, deadline=now + DEADLINE)


def test_offer_ends_after_its_number_of_readers() -> None:
    offers = Offers(MAX_BYTES, SECONDS)
    assert not offers.renew(b"a", 0.0)
    assert offers.put(b"a", b"content", 0.0)
    assert offers.renew(b"a", 1.0)
    assert [offers.read(b"a") for _ in range(3)] == [b"content", b"content", None]
    assert offers.num_bytes == 0


def test_unread_offers_expire_and_prompt_prefix_stays() -> None:
    offers = Offers(MAX_BYTES, SECONDS)
    taken = [offers.put(pack(name), bytes(300), n) for n, name in enumerate(NAMES)]
    assert taken == [True] * 3 + [False] * 9
    assert offers.expire(SECONDS - 1) == 0
    assert offers.expire(SECONDS + 1) == 2
    assert offers.num_bytes == 300
    offers.clear()
    assert offers.num_bytes == 0


def test_only_shared_prefixes_are_evicted_for_new_offers() -> None:
    offers = Offers(MAX_BYTES, SECONDS)
    for key in (b"a", b"b", b"c"):
        assert offers.put(key, bytes(300), 0.0)
    for _ in range(5):
        assert offers.renew(b"b", 1.0)
    assert offers.put(b"d", bytes(300), 2.0)
    assert not offers.put(b"e", bytes(300), 2.0)
    assert [offers.read(key) is None for key in (b"a", b"b", b"c", b"d")] == [
        False, True, False, False,
    ]  # fmt: skip
    assert offers.num_bytes == 0


class TwoEngines(RuleBasedStateMachine):
    """A prefill engine with an incarnation, a decode engine, and a delaying, breaking link."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.offers = Offers(MAX_BYTES, SECONDS)
        self.incarnation = 1
        self.questions: deque[tuple[int, int, BlockName]] = deque()
        """Pull, asked incarnation and block."""
        self.answers: deque[tuple[int, BlockName, bytes, bytes | None]] = deque()
        self.pulls: dict[int, tuple[Pull, int, int]] = {}
        """By number: with how many blocks are wanted, and the incarnation that is asked."""
        self.got: dict[int, list[bytes]] = {}
        self.num_pulls = 0

    def true(self, name: BlockName) -> bytes:
        return pack(name) * 5

    # -- the prefill engine ------------------------------------------------------------------

    @rule(count=st.integers(1, len(NAMES)))
    def prefill(self, count: int) -> None:
        for name in NAMES[:count]:
            if not self.offers.renew(pack(name), self.now):
                self.offers.put(pack(name), self.true(name), self.now)

    @rule()
    def restart(self) -> None:
        self.incarnation += 1
        self.offers = Offers(MAX_BYTES, SECONDS)
        self.cut()

    @rule()
    def reset(self) -> None:
        self.offers.clear()

    @precondition(lambda self: self.questions)
    @rule(damage=st.booleans())
    def answer(self, damage: bool) -> None:
        number, incarnation, name = self.questions.popleft()
        content = self.offers.read(pack(name)) if incarnation == self.incarnation else None
        digest = b"" if content is None else checksum(pack(name), content)
        if content is not None and damage:
            content = content[:-1] + b"?"
        self.answers.append((number, name, digest, content))

    # -- the link ----------------------------------------------------------------------------

    @rule()
    def cut(self) -> None:
        self.questions.clear()
        self.answers.clear()
        for pull, _, _ in self.pulls.values():
            pull.give_up()

    @precondition(lambda self: self.answers)
    @rule()
    def lose_an_answer(self) -> None:
        self.answers.popleft()

    @rule(seconds=st.sampled_from([0.5, 3.0, 40.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.offers.expire(self.now)
        for pull, _, _ in self.pulls.values():
            pull.tick(self.now)

    # -- the decode engine -------------------------------------------------------------------

    @rule(count=st.integers(1, len(NAMES)), stale=st.booleans())
    def begin(self, count: int, stale: bool) -> None:
        self.num_pulls += 1
        incarnation = self.incarnation - stale
        self.pulls[self.num_pulls] = (pull_of(count, now=self.now), count, incarnation)
        self.got[self.num_pulls] = []

    @rule()
    def next_names(self) -> None:
        for number, (pull, _, incarnation) in self.pulls.items():
            for name in pull.next_names(self.now):
                self.questions.append((number, incarnation, name))

    @precondition(lambda self: self.answers)
    @rule()
    def take(self) -> None:
        number, name, digest, content = self.answers.popleft()
        if number not in self.pulls:
            return
        is_good = content is not None and checksum(pack(name), content) == digest
        if self.pulls[number][0].received(name, is_good=is_good, now=self.now):
            assert content is not None
            self.got[number].append(content)

    @rule()
    def give_up_one(self) -> None:
        if self.pulls:
            next(iter(self.pulls.values()))[0].give_up()

    # -- what always holds -------------------------------------------------------------------

    @invariant()
    def received_blocks_are_a_correct_prefix(self) -> None:
        for number, (pull, count, _) in self.pulls.items():
            expected = [self.true(name) for name in NAMES[:count]]
            assert self.got[number] == expected[: pull.num_received]

    @invariant()
    def memory_is_bounded_and_freed_in_time(self) -> None:
        assert self.offers.num_bytes <= MAX_BYTES
        offered = [*self.offers._once.values(), *self.offers._again.values()]
        assert all(each.until <= self.now + SECONDS for each in offered)
        assert self.offers.num_bytes == sum(len(each.content) for each in offered)

    @invariant()
    def every_pull_ends_in_time(self) -> None:
        for pull, _, _ in self.pulls.values():
            assert pull.is_over or self.now < pull.ends_at <= self.now + DEADLINE

    @invariant()
    def requests_in_flight_are_within_window(self) -> None:
        for number, (pull, _, _) in self.pulls.items():
            on_its_way = sum(each[0] == number for each in (*self.questions, *self.answers))
            assert pull.is_over or on_its_way <= WINDOW


TestTwoEngines = TwoEngines.TestCase


@given(st.integers(1, 12), st.integers(1, 6))
def test_all_blocks_are_received_without_failures(count: int, window: int) -> None:
    pull = Pull(NAMES[:count], window=window, patience=PATIENCE, deadline=DEADLINE)
    link: deque[BlockName] = deque()
    while not pull.is_over:
        link.extend(pull.next_names(0.0))
        assert pull.received(link.popleft(), is_good=True, now=0.0)
    assert pull.is_complete
    assert not link
