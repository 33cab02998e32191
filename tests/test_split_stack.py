"""A stack whose prompts and answers are computed by different engines, which are killed."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from benchmarks.failover import STRIKES, split
from benchmarks.running_stack import RunningStack
from tests.support.http import complete
from tests.support.metrics import metric, total
from tests.support.waiting import until

pytestmark = pytest.mark.stack

PROMPTS = [
    f"{n} times: " + "Friends, Romans, countrymen, lend me your ears. " * 6 for n in range(8)
]
EXACT = ("--dtype", "float32", "--batch-invariant")
SPLIT = (
    *EXACT, "--data-parallel-size", "3", "--prefill-engines", "1", "--prefill-split-length", "48",
)  # fmt: skip


def test_prefill_and_decode_engines_each_do_their_part() -> None:
    with RunningStack(*SPLIT) as stack, ThreadPoolExecutor(len(PROMPTS)) as threads:
        list(threads.map(partial(complete, stack.url, tokens=20), PROMPTS))
        generated = metric(stack.url, "engine_generation_tokens_total")
        until(
            lambda: (
                metric(stack.url, "kv_transfer_hits_total").get("0", 0) == 0
                and total(stack.url, "kv_transfer_hits_total") > 300
            ),
            "decode engines have read blocks",
        )
        assert generated["0"] <= len(PROMPTS), "the prefill engine draws a token of each prompt"
        assert total(stack.url, "kv_transfer_failures_total") == 0
        assert total(stack.url, "kv_transfer_bytes_total") > 0


LINKS = ("link cut", "link silent", "blocks damaged")
"""Over TCP, which has such links; over local sockets processes die."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "over_tcp"),
    [([kind for kind in STRIKES if kind not in LINKS], False), (LINKS, True)],
    ids=["ipc", "tcp with CURVE"],
)
def test_answers_survive_deaths_during_block_transfer(kinds: Sequence[str], over_tcp: bool) -> None:
    rows, problems = split(2, 20, EXACT, kinds, stop_seconds=6, over_tcp=over_tcp)
    assert problems == []
    assert all(row.right + row.excused == row.answers > 0 for row in rows.values())
    assert all(row.broken for kind, row in rows.items() if kind in LINKS)
