"""The engine chosen for a request, by policy."""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy import quantile

from benchmarks.routing_bench import (
    Result,
    Simulation,
    Workload,
    agents,
    shared_prefixes,
    skewed,
)
from engine.shared.plugins import BadPlugin
from engine.shared.settings import settings_of
from server.config import FrontEndConfig
from server.router.routing import (
    AFFINITY_BAND,
    AFFINITY_BLOCK,
    AFFINITY_SLACK,
    HASHED_BLOCKS,
    POLICIES,
    PREFILL_TOKENS_PER_REQUEST,
    Choice,
    EngineLoad,
    LeastLoaded,
    PowerOfTwo,
    PrefixAffinity,
    PrefixAware,
    RoundRobin,
    build_policy,
    cost,
)
from tests.support.cpu_time import takes_less_than
from tests.support.plugins import offer


def load(rank: int, requests: int = 0, *, waiting: int = 0, tokens: int = 0) -> EngineLoad:
    return EngineLoad(rank, requests, waiting, tokens, 0.0)


def prompt(seed: int, blocks: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(1000) for _ in range(blocks * AFFINITY_BLOCK)]


def test_every_configured_name_has_its_policy() -> None:
    [setting] = [each for each in settings_of(FrontEndConfig) if each.name == "routing_policy"]
    assert setting.choices
    for name in setting.choices:
        assert f" {name}: " in setting.help
        choice = build_policy(name, 3).choose([load(0), load(1, 4)], [1, 2, 3])
        assert choice.rank in (0, 1)


def test_least_loaded_weighs_queued_tokens_and_memory_pressure() -> None:
    policy = LeastLoaded()
    assert policy.choose([load(0, 3), load(1, 2, tokens=2000)]).rank == 0
    pressed = EngineLoad(0, 4, 2, 0, 0.99)
    assert cost(pressed) > cost(EngineLoad(0, 4, 2, 0, 0.5))
    assert policy.choose([pressed, load(1, 6)]).rank == 1


def test_round_robin_rotates_by_rank_while_engines_change() -> None:
    policy = RoundRobin()
    four = [load(rank) for rank in range(4)]
    assert [policy.choose(four).rank for _ in range(5)] == [0, 1, 2, 3, 0]
    assert policy.choose([four[0], four[2], four[3]]).rank == 2
    assert policy.choose(four[:2]).rank == 0


def test_power_of_two_avoids_the_fullest_and_spreads_over_all() -> None:
    policy = PowerOfTwo(7)
    loads = [load(0, 9), load(1), load(2), load(3)]
    chosen = Counter(policy.choose(loads).rank for _ in range(300))
    assert set(chosen) == {1, 2, 3}
    assert min(chosen.values()) > 60
    assert policy.choose([load(5)]).rank == 5


class TestPrefixAffinity:
    def test_prompts_of_different_roots_share_no_prefix(self) -> None:
        policy = PrefixAffinity()
        shared = prompt(1, 4)
        policy.choose([load(0)], shared, cache_root=b"a" * 16)
        loads = [load(0, 1), load(1)]
        others = [policy.choose(loads, shared, cache_root=bytes([each]) * 16) for each in range(20)]
        assert {choice.reason for choice in others} == {"prefix_hash"}
        assert {choice.rank for choice in others} == {0, 1}
        assert policy.choose(loads, shared, cache_root=b"a" * 16) == (0, "prefix")

    def test_prompts_with_common_prefix_go_to_one_engine(self) -> None:
        policy = PrefixAffinity()
        loads = [load(rank) for rank in range(8)]
        shared = prompt(1, 4)
        home = policy.choose(loads, shared + prompt(2, 1)).rank
        for seed in range(3, 40):
            choice = policy.choose(loads, shared + prompt(seed, 1))
            assert choice == (home, "prefix")

    def test_longest_prefix_decides(self) -> None:
        policy = PrefixAffinity()
        system, question = prompt(1, 2), prompt(2, 2)
        policy.choose([load(0)], system + question)
        policy.choose([load(1)], system + prompt(3, 2))
        loads = [load(0), load(1)]
        assert policy.choose(loads, system + question).rank == 0
        assert policy.choose(loads, system + prompt(3, 2) + prompt(4, 1)).rank == 1

    def test_prefix_moves_away_from_much_busier_engine(self) -> None:
        policy = PrefixAffinity()
        shared = prompt(1, 2)
        policy.choose([load(0)], shared)
        assert policy.choose([load(0, 2), load(1)], shared) == (0, "prefix")
        assert policy.choose([load(0, 9), load(1)], shared).rank == 1
        assert policy.choose([load(0), load(1)], shared) == (1, "prefix")

    def test_longer_prefixes_outweigh_more_load(self) -> None:
        policy = PrefixAffinity()
        short, long = prompt(1, 1), prompt(2, 64)
        for each in (short, long):
            policy.choose([load(0)], each)
        loads = [load(0, 5), load(1)]
        assert policy.choose(loads, long) == (0, "prefix")
        assert policy.choose(loads, short).rank == 1

    def test_a_lost_engine_is_not_chosen(self) -> None:
        policy = PrefixAffinity()
        shared = prompt(1, 2)
        policy.choose([load(0)], shared)
        assert policy.choose([load(1), load(2)], shared).rank in (1, 2)

    def test_unused_prefixes_expire(self) -> None:
        policy = PrefixAffinity(capacity=8)
        for seed in range(10):
            policy.choose([load(seed % 2)], prompt(seed, 2))
        assert len(policy._rank_of) == 8
        loads = [load(0), load(1)]
        assert policy.choose(loads, prompt(9, 2)).reason == "prefix"
        assert policy.choose(loads, prompt(0, 2)).reason == "prefix_hash"

    def test_front_ends_choose_same_engine_for_unknown_prefix(self) -> None:
        loads = [load(rank) for rank in range(8)]
        homes = Counter[int]()
        for seed in range(80):
            shared = prompt(seed, HASHED_BLOCKS + 2)
            asked = [
                PrefixAffinity(start).choose(loads, shared + prompt(start, 1)) for start in (1, 2)
            ]
            assert asked[0].reason == "prefix_hash"
            assert asked[0] == asked[1]
            homes[asked[0].rank] += 1
        assert len(homes) == 8
        assert max(homes.values()) < 25, "beginnings spread over engines"

    def test_only_prefixes_of_a_lost_engine_move(self) -> None:
        loads = [load(rank) for rank in range(8)]
        for seed in range(40):
            home = PrefixAffinity().choose(loads, prompt(seed, 4)).rank
            left = [each for each in loads if each.rank != (home + 1) % 8]
            assert PrefixAffinity().choose(left, prompt(seed, 4)).rank == home

    def test_much_busier_engines_get_nothing_by_hash(self) -> None:
        loads = [load(rank) for rank in range(8)]
        home = PrefixAffinity().choose(loads, prompt(1, 4)).rank
        loads[home] = load(home, 9)
        others = [PrefixAffinity(start).choose(loads, prompt(1, 4)).rank for start in range(3)]
        assert home not in others
        assert len(set(others)) == 1, "they agree on the next one"

    def test_prompts_shorter_than_a_block_go_to_the_least_loaded(self) -> None:
        policy = PrefixAffinity()
        for _ in range(3):
            choice = policy.choose([load(0, 3), load(1)], [1, 2, 3])
            assert choice == (1, "least_loaded")


def cached(rank: int, tokens: int, requests: int = 0) -> EngineLoad:
    return load(rank, requests)._replace(cached_tokens=tokens)


class TestPrefixAware:
    def test_engine_with_most_cached_tokens_is_chosen_if_worthwhile(self) -> None:
        policy = PrefixAware()
        tokens = prompt(1, 64)
        holder = PREFILL_TOKENS_PER_REQUEST
        assert policy.choose([cached(0, holder, 1), load(1)], tokens) == (0, "cached")
        assert policy.choose([cached(0, holder, 3), load(1)], tokens) == (1, "least_loaded")
        assert policy.choose([cached(0, holder, 3), cached(1, 512)], tokens) == (1, "cached")

    @given(
        st.lists(
            st.tuples(st.integers(0, 30), st.integers(0, 5000), st.integers(0, 4096)),
            min_size=1,
            max_size=12,
        ),
        st.integers(0, 20),
    )
    def test_engine_is_not_chosen_if_load_exceeds_savings(
        self, engines: list[tuple[int, int, int]], unseen: int
    ) -> None:
        loads = [
            load(rank, requests, tokens=queued)._replace(cached_tokens=tokens)
            for rank, (requests, queued, tokens) in enumerate(engines)
        ]
        choice = PrefixAware().choose(loads, prompt(1, 64), unseen)
        chosen, least = loads[choice.rank], min(map(cost, loads))
        if choice.reason == "cached":
            saved = chosen.cached_tokens / PREFILL_TOKENS_PER_REQUEST
            assert cost(chosen) <= least * (1 + AFFINITY_BAND) + AFFINITY_SLACK + saved

    def test_front_ends_choose_same_engine_for_uncached_prompt(self) -> None:
        loads = [load(rank) for rank in range(8)]
        chosen = {PrefixAware(start).choose(loads, prompt(1, 6)) for start in range(4)}
        assert {reason for _, reason in chosen} == {"prefix_hash"}
        assert len(chosen) == 1

    def test_a_prompt_shorter_than_a_block_goes_to_the_least_loaded(self) -> None:
        assert PrefixAware().choose([load(0, 3), load(1)], [1, 2]) == (1, "least_loaded")

    def test_independent_front_ends_do_not_all_choose_same_holder(self) -> None:
        loads = [cached(rank, 512, 0 if rank == 0 else 1) for rank in range(16)]
        chosen = Counter(PrefixAware(s).choose(loads, prompt(1, 64), 15).rank for s in range(100))
        assert len(chosen) > 8
        assert chosen[0] < 50
        alone = [*(load(rank) for rank in range(15)), cached(15, 2048, 1)]
        assert {PrefixAware(s).choose(alone, prompt(1, 64), 15).rank for s in range(20)} == {15}


@pytest.mark.parametrize("name", POLICIES)
def test_choosing_among_100_engines_takes_under_a_millisecond(name: str) -> None:
    policy = build_policy(name, 0)
    loads = [load(rank, rank % 7) for rank in range(100)]
    tokens = prompt(1, 64)
    policy.choose(loads, tokens)

    def choose() -> None:
        for _ in range(100):
            policy.choose(loads, tokens)

    takes_less_than(100 * 0.001, choose)


def simulate(workload: Workload, policy: str, directory: Path, requests: int) -> Result:
    specs = list(workload(random.Random(1), requests, 4))
    return Simulation(POLICIES[policy].build, 4, 2, 1, directory).run(specs)


@pytest.mark.slow
def test_prefix_affinity_increases_cache_hits_and_reduces_latency(tmp_path: Path) -> None:
    plain = simulate(shared_prefixes, "least-loaded", tmp_path, 400)
    affine = simulate(shared_prefixes, "prefix-affinity", tmp_path, 400)
    assert affine.cached > 1.1 * plain.cached
    assert quantile(affine.total, 0.99) < quantile(plain.total, 0.99)
    assert max(affine.busy) < 1.3 * sum(affine.busy) / len(affine.busy)


@pytest.mark.slow
def test_prefix_aware_routing_reduces_prefill_and_latency(tmp_path: Path) -> None:
    plain = simulate(agents, "least-loaded", tmp_path, 400)
    aware = simulate(agents, "prefix-aware", tmp_path, 400)
    computed = [each.prompt_tokens - each.cached for each in (plain, aware)]
    assert computed[1] < 0.8 * computed[0]
    assert quantile(aware.first_token, 0.5) < quantile(plain.first_token, 0.5)
    assert abs(aware.expected - aware.cached) < 0.1 * aware.cached
    assert max(aware.busy) < 1.3 * sum(aware.busy) / len(aware.busy)


@pytest.mark.slow
def test_front_ends_without_shared_memory_have_similar_cache_hits(tmp_path: Path) -> None:
    specs = list(shared_prefixes(random.Random(1), 400, 4))
    found = {
        number: Simulation(PrefixAffinity, 4, number, number, tmp_path).run(specs).cached
        for number in (1, 8)
    }
    assert found[8] > 0.9 * found[1]


@pytest.mark.slow
def test_least_loaded_has_lower_latency_than_round_robin(tmp_path: Path) -> None:
    waited = {
        policy: quantile(simulate(skewed, policy, tmp_path, 400).first_token, 0.99)
        for policy in ("least-loaded", "round-robin")
    }
    assert waited["least-loaded"] < 0.8 * waited["round-robin"]


def test_independent_front_ends_do_not_all_choose_same_engine() -> None:
    loads = [load(rank, requests=3 if rank else 0) for rank in range(8)]
    alone = LeastLoaded()
    assert {alone.choose(loads).rank for _ in range(20)} == {0}
    chosen = [LeastLoaded(start).choose(loads, unseen_front_ends=15).rank for start in range(200)]
    assert 30 <= chosen.count(0) <= 80, "an empty engine is preferred, not besieged"
    assert len(set(chosen)) == 8


def test_number_of_compared_engines_is_bounded() -> None:
    loads = [load(0, requests=0), load(1, requests=9)]
    assert {LeastLoaded(s).choose(loads, unseen_front_ends=99).rank for s in range(20)} == {0}


class FailsForLongPrompts:
    """A plugin's policy: the last engine, except for prompts on which it fails."""

    def __init__(self, start: int) -> None:
        self.start = start

    def choose(
        self,
        loads: Sequence[EngineLoad],
        prompt_token_ids: Sequence[int] = (),
        unseen_front_ends: int = 0,
        *,
        cache_root: bytes = b"",
    ) -> Choice:
        if len(prompt_token_ids) == 2:
            return Choice(17, "wrong")
        return Choice(loads[-1 if not prompt_token_ids else len(prompt_token_ids)].rank, "last")


class TakesNoPrompt:
    def __init__(self, start: int) -> None:
        pass

    def choose(self, loads: Sequence[EngineLoad]) -> Choice:
        return Choice(loads[0].rank, "first")


def test_failed_plugin_policy_falls_back_to_least_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    offer(tmp_path, "swell.routing_policies", last=f"{__name__}:FailsForLongPrompts")
    monkeypatch.syspath_prepend(tmp_path)
    policy = build_policy("last", 3)
    loads = [load(0, 1), load(1, 2)]
    assert policy.choose(loads) == Choice(1, "last")
    for prompt_token_ids in ([5, 5], [5, 5, 5]):  # a nonexistent engine, and an IndexError
        assert policy.choose(loads, prompt_token_ids) == Choice(0, "least_loaded")
    assert [each.message for each in caplog.records] == [
        "--routing-policy last failed, so the least loaded engine was chosen; this is not "
        "logged again: there is no engine 17"
    ]


def test_invalid_plugin_policy_is_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(tmp_path, "swell.routing_policies", short=f"{__name__}:TakesNoPrompt")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BadPlugin, match=r"--routing-policy short: .*TypeError.*argument"):
        build_policy("short", 0)
