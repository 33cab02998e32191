"""Simulations in virtual time, small enough for a test suite."""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import simulate
from benchmarks.simulation.calibration import (
    COSTS,
    LOADS,
    POLICIES,
    Case,
    Mean,
    Run,
    cases,
    checks,
    mean_of,
    run_one,
)
from benchmarks.simulation.costs import CostModel
from benchmarks.simulation.fleet import Fleet, FleetShape
from benchmarks.simulation.records import Recorder, latency, summarize
from benchmarks.simulation.replica import EngineShape, Replica, message
from benchmarks.simulation.report import calibration_page
from benchmarks.simulation.workload import (
    NS,
    InvalidSpec,
    Lengths,
    RequestSpec,
    Workload,
    burst,
    closed_loop,
    draw_requests,
    poisson,
    read_trace,
)
from engine.shared.config import SchedulerConfig

pytestmark = pytest.mark.slow

# -- workloads -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "mean"),
    [
        ("constant:300", 300),
        ("uniform:100,300", 200),
        ("normal:300,20", 300),
        ("lognormal:200,0.5", 226),
        ("exponential:200", 200),
        ("exponential:200,max=200", 126),
        ("constant:5,min=50", 50),
    ],
)
def test_lengths_have_the_mean_that_their_name_says(text: str, mean: float) -> None:
    lengths, rng = Lengths.parse(text), random.Random(0)
    drawn = [lengths.draw(rng) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.03)
    assert min(drawn) >= 1


@pytest.mark.parametrize(
    "text", ["", "constant", "constant:x", "normal:5", "weird:1", "constant:1,most=5",
             "exponential:0", "constant:1,min=0", "constant:1,min=9,max=8"]
)  # fmt: skip
def test_a_wrong_length_is_refused_with_what_was_expected(text: str) -> None:
    with pytest.raises(InvalidSpec, match="expected constant:N"):
        Lengths.parse(text)


def specs(count: int, *, output: str = "uniform:2,40", seed: int = 0) -> list[RequestSpec]:
    rng = random.Random(seed)
    return draw_requests(count, Lengths.parse("uniform:10,200"), Lengths.parse(output), rng)


def test_poisson_arrivals_have_the_rate_and_a_burst_comes_at_once() -> None:
    requests, rng = specs(4000), random.Random(3)
    arrivals = poisson(requests, 50.0, rng).arrivals_ns
    assert arrivals is not None
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] / NS == pytest.approx(4000 / 50, rel=0.05)
    at_once = burst(requests, 50.0, 100, 2.0, rng).arrivals_ns
    assert at_once is not None
    assert len(at_once) == 4000
    assert at_once.count(2 * NS) == 100


def test_a_trace_is_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"arrival_s": 1.5, "prompt_tokens": 7, "output_tokens": 3},
        {"arrival_s": 0.25, "prompt_tokens": 5, "output_tokens": 2},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n", encoding="utf-8")
    workload = read_trace(path)
    assert workload.requests == [RequestSpec(5, 2), RequestSpec(7, 3)]
    assert workload.arrivals_ns == [NS // 4, 3 * NS // 2]
    path.write_text('{"arrival_s": 1}\n', encoding="utf-8")
    with pytest.raises(InvalidSpec, match="line 1: KeyError 'prompt_tokens'"):
        read_trace(path)


# -- costs and records ---------------------------------------------------------------------------


def test_a_step_costs_what_its_rows_cost() -> None:
    costs = CostModel(1000, 10, 1, 5, mixed_ns=300)
    replica = Replica(EngineShape(SchedulerConfig(max_num_seqs=4), 64), costs)
    assert replica.begin() == (1000, 0)
    assert replica.dummy
    replica.finish()
    replica.inbox = [message(0, RequestSpec(20, 9), 0)]
    replica.drain()
    assert replica.begin() == (1000 + 20 * 5 + 300, 20)
    replica.finish()
    assert replica.begin() == (1000 + 10 + 21, 0)


def test_percentiles_are_nearest_ranks() -> None:
    assert latency([n * 1_000_000 for n in range(1, 101)]) == (50.5, 50, 90, 99)
    assert latency([]) == (0, 0, 0, 0)


# -- independent engines -------------------------------------------------------------------------


def small_fleet(workload: Workload, *, engines: int = 6, front_ends: int = 3) -> Recorder:
    engine = EngineShape(SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256), 256, 16)
    shape = FleetShape(engines, front_ends, engine, CostModel(1_000_000, 50_000, 10, 10_000))
    return Fleet(shape, workload, seed=1, sample_every_ns=NS // 100).run()


def outcome(recorder: Recorder) -> list[tuple[int, int, int, int]]:
    return [(r.engine, r.arrived, r.first, r.last) for r in recorder.records]


def test_a_fleet_serves_everything_and_every_run_is_the_same() -> None:
    workload = poisson(specs(400), 600.0, random.Random(5))
    first, second = small_fleet(workload), small_fleet(workload)
    assert outcome(first) == outcome(second)
    assert all(record.finished for record in first.records)
    assert first.tokens == sum(spec.output_tokens for spec in workload.requests)
    assert first.gaps.total() == first.tokens - len(workload.requests)
    summary = summarize(first)
    assert summary.dummy_share == 0
    assert summary.imbalance < 1.35


def test_clients_of_a_closed_loop_wait_for_their_answers() -> None:
    recorder = small_fleet(closed_loop(specs(100), 10))
    assert len(recorder.records) == 100
    ends = sorted(record.last for record in recorder.records)
    later = sorted(record.arrived for record in recorder.records)[10:]
    assert later == [end + 1_000_000 for end in ends[: len(later)]]


# -- lockstep groups -----------------------------------------------------------------------------

PUB = LOADS["pub"]


@pytest.fixture(scope="module")
def published() -> dict[str, Run]:
    return {name: run_one(PUB, POLICIES[name], 1) for name in ("none", "balance", "level")}


def test_balance_gains_on_the_calibrated_load_and_level_gains_more(
    published: dict[str, Run],
) -> None:
    none, balance, level = (published[n].summary for n in ("none", "balance", "level"))
    assert balance.output_rate > 1.15 * none.output_rate
    assert level.output_rate > 1.12 * balance.output_rate
    assert level.ttft.mean < balance.ttft.mean
    assert level.tpot.mean < 0.80 * none.tpot.mean


def test_no_policy_holds_too_long_or_without_reason(published: dict[str, Run]) -> None:
    for run in published.values():
        assert run.holds.longest_hold < 16 * PUB.ranks
        assert run.holds.held_without_decodes == 0
        assert run.holds.late_tokens == 0
        assert run.summary.requests == PUB.count


def test_balance_changes_nothing_while_a_slot_is_free_everywhere() -> None:
    load = replace(LOADS["pub33"], count=160)
    runs = [run_one(load, POLICIES[name], 1) for name in ("none", "balance")]
    assert outcome(runs[0].recorder) == outcome(runs[1].recorder)


def test_a_group_with_traffic_on_one_rank_runs_dummy_batches_and_is_not_held() -> None:
    load = replace(LOADS["lone"], count=12)
    none, level = (run_one(load, POLICIES[name], 1) for name in ("none", "level"))
    assert outcome(none.recorder) == outcome(level.recorder)
    assert level.holds.longest_hold == 0
    assert level.summary.dummy_share == pytest.approx(0.75)


def test_taking_requests_in_after_the_gather_is_noticed() -> None:
    load = replace(LOADS["poisson"], count=40)
    proper = run_one(load, POLICIES["level"], 1)
    wrong = run_one(load, POLICIES["level"], 1, gather_first=True)
    assert proper.holds.late_tokens == 0
    assert wrong.holds.late_tokens > 0
    assert wrong.summary.tpot.mean > 1.1 * proper.summary.tpot.mean


# -- the command ---------------------------------------------------------------------------------

SMALL = ["--requests", "40", "--rate", "400", "--output", "uniform:2,20"]


@pytest.mark.parametrize(
    "command",
    [
        ["fleet", "--engines", "3", "--front-ends", "2"],
        ["lockstep", "--ranks", "2", "--admission-policy", "level"],
    ],
)
def test_the_command_prints_and_draws(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / "run.png"
    assert simulate.main([*command, *SMALL, "--plot", str(figure)]) == 0
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert "TTFT ms" in capsys.readouterr().out


def test_a_trace_replaces_the_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"arrival_s": 0.1, "prompt_tokens": 9, "output_tokens": 4}\n', encoding="utf-8"
    )
    assert simulate.main(["lockstep", "--trace", str(trace)]) == 0
    assert simulate.main(["lockstep", "--trace", str(tmp_path / "absent")]) == 2
    assert "No such file" in capsys.readouterr().out


def test_drawing_without_matplotlib_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert simulate.main(["fleet", *SMALL, "--plot", "never.png"]) == 2
    assert "pip install 'swell[plot]'" in capsys.readouterr().out


# -- the page about the calibrated group ---------------------------------------------------------

GOOD = {"none": 1390.0, "balance": 1670.0, "level": 1980.0}


def invented_means(level_gain: float = 1.0) -> dict[Case, Mean]:
    """Means of all cases as if every load behaved like the published one."""
    means = {}
    for case in cases():
        rate = GOOD.get(case.policy, 1500.0) * (level_gain if case.policy == "level" else 1.0)
        means[case] = Mean(
            rate=rate, published_rate=rate * 0.92, ttft=6.6, ttft_p99=36, tpot=87e3 / rate,
            e2e=90e3 / rate, itl_p99=1000, dummy_share=0, longest_hold=40, held_without_decodes=0,
            late_tokens=0,
        )  # fmt: skip
    return means


def test_the_page_says_which_demands_hold() -> None:
    good = {check.demand: check.passed for check in checks(invented_means())}
    bad = {check.demand: check.passed for check in checks(invented_means(level_gain=0.8))}
    demand = "level over none: at least +35.0% tok/s"
    assert good[demand]
    assert not bad[demand]
    page = calibration_page(invented_means(), checks(invented_means(0.8)), "figure.png")
    assert "**FAIL**" in page
    assert "not a measurement of hardware" in page.replace("\n", " ")


def test_means_are_over_streams_and_invariants_the_worst_of_all(published: dict[str, Run]) -> None:
    mean = mean_of([published["none"], published["level"]])
    rates = [published[name].summary.output_rate for name in ("none", "level")]
    assert mean.rate == pytest.approx(sum(rates) / 2)
    assert mean.published_rate < mean.rate
    assert mean.longest_hold == published["level"].holds.longest_hold
    assert COSTS.prefill_token_ns == 315_000
