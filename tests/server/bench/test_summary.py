import statistics
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.bench.summary import (
    ClientCost,
    Record,
    client_warnings,
    is_good,
    max_at_once,
    parse_goodput,
    percentile,
    summarize,
)


def record(
    index: int, *, total: float = 1.0, first: float | None = 0.2, tokens: int = 5, **more: object
) -> Record:
    fields = {"scheduled": 0.0, "started": float(index), "status": 200, "prompt_tokens": 10}
    gaps = array("f", [0.125] * 4).tobytes()
    return Record(
        index=index, total=total, first_token=first, output_tokens=tokens, gaps=gaps,
        **{**fields, **more},  # type: ignore[arg-type]
    )  # fmt: skip


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=60))
def test_percentiles_agree_with_the_standard_library(values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    ordered = sorted(values)
    for percent in (1, 50, 90, 99):
        assert percentile(ordered, percent) == pytest.approx(cuts[percent - 1], abs=1e-6)
    assert (percentile(ordered, 0), percentile(ordered, 100)) == (ordered[0], ordered[-1])


def test_a_percentile_of_nothing_is_refused() -> None:
    assert percentile([3.0], 99) == 3.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_summary_numbers_of_a_run_are_correct() -> None:
    records = [record(0), record(1, total=3.0, tokens=1), record(2, error="http_503", status=503)]
    summary = summarize(records, [50, 99], {"ttft": 0.5})
    assert summary.duration == 4.0
    assert (summary.completed, summary.failed, summary.errors) == (2, 1, {"http_503": 1})
    assert (summary.total_input_tokens, summary.total_output_tokens) == (20, 6)
    assert summary.request_throughput == 0.5
    assert summary.output_throughput == 1.5
    assert summary.total_token_throughput == 6.5
    assert summary.request_goodput == 0.5
    assert summary.latencies["ttft"].percentiles == {50: 200.0, 99: 200.0}
    assert summary.latencies["itl"].mean == 125.0
    assert summary.latencies["itl"].count == 8
    assert summary.latencies["tpot"].count == 1
    assert summary.latencies["tpot"].mean == pytest.approx(200.0)
    assert summary.latencies["e2el"].max == 3000.0
    assert summary.schedule_delay is None


def test_a_run_without_a_success_has_no_latencies() -> None:
    summary = summarize([record(0, error="timeout")], [50], {})
    assert summary.latencies == {}
    assert summary.request_goodput is None
    assert summarize([], [50], {}).request_throughput == 0.0


def test_lateness_is_measured_against_the_schedule() -> None:
    summary = summarize([record(1, scheduled=0.9), record(3, scheduled=3.0)], [50], {})
    assert summary.schedule_delay is not None
    assert summary.schedule_delay.max == pytest.approx(100.0)


def test_goodput_limits_are_parsed_and_kept() -> None:
    limits = parse_goodput(["ttft:500", "tpot:50", "e2el:2000"])
    assert limits == {"ttft": 0.5, "tpot": 0.05, "e2el": 2.0}
    assert is_good(record(0, total=0.4), limits)
    assert not is_good(record(0, total=0.41), limits)
    assert not is_good(record(0, first=0.6, total=0.7), limits)
    assert not is_good(record(0, total=0.4, error="stream_cut"), limits)
    assert is_good(record(0, first=None, tokens=1), limits)


@pytest.mark.parametrize("word", ["ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:0", "speed:3"])
def test_wrong_goodput_limits_are_refused(word: str) -> None:
    with pytest.raises(ValueError, match="ttft, tpot, e2el"):
        parse_goodput([word])


def test_concurrency_is_counted_from_sending_to_the_last_byte() -> None:
    assert max_at_once([record(0, total=1.5), record(1, total=1.0), record(2)]) == 2
    assert max_at_once([]) == 0


def cost(share: float, lag: float = 0.001) -> ClientCost:
    return ClientCost(10 * share, 10.0, deltas=100, loop_lag_p99=lag, loop_lag_max=lag)


def test_bottleneck_in_client_is_reported() -> None:
    assert client_warnings([cost(0.3)], 500.0, open_loop=False) == []
    assert "--processes" in client_warnings([cost(0.2), cost(0.95)], 0.0, open_loop=False)[0]
    assert "no core to spare" in client_warnings([cost(0.2, lag=0.05)], 0.0, open_loop=False)[0]
    assert "500 ms late" in client_warnings([cost(0.2)], 500.0, open_loop=True)[0]
