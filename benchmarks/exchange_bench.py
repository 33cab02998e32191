"""What engines that compute one model together pay for their exchanges, without the arithmetic.

python -m benchmarks.exchange_bench
python -m benchmarks.exchange_bench --ranks 2 4 --tokens 1 16 64 512 --hidden 2048 --per-token 8

Starts the ranks as processes on this machine and times, as the median over repetitions that take
turns: the gather of a row of integers before a step, the sum that ends each half of a layer under
tensor parallelism, and the way to the experts and back under expert parallelism, in both of its
forms: all tokens to all ranks, or each to the ranks that it needs. Experts return what they get.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

import msgspec
from rich.console import Console
from rich.table import Table

from engine.distributed.spec import GroupSpec, listener_address, open_listener

if TYPE_CHECKING:
    from engine.models.moe import Expert

_ROW_WIDTH = 20
_NUM_EXPERTS = 64


class Load(msgspec.Struct, frozen=True):
    """What one rank measures."""

    address: str
    rank: int
    size: int
    hidden: int
    per_token: int
    tokens: list[int]
    repeat: int


def measure(load: Load) -> dict[str, float]:
    """Return seconds per exchange, by what was exchanged."""
    import torch

    from engine.distributed.group import join_group
    from engine.models.parallel.balance import expert_share
    from engine.models.parallel.experts import ExpertGroup, SendingRule, SpreadExperts

    torch.set_num_threads(1)
    group = join_group(GroupSpec(load.address, load.rank, load.size, 1, timeout_s=120.0))
    experts = ExpertGroup(_NUM_EXPERTS, load.per_token, torch.device("cpu"))
    experts.join(group)
    spread = SpreadExperts(experts)
    untouched = cast("Expert", lambda x: x)
    share = expert_share(_NUM_EXPERTS, load.rank, load.size)
    spread.hold(share.start, share, lambda _: untouched)
    rules = {"all to all": SendingRule(10**9), "where needed": SendingRule(0, 2.0)}
    seconds: dict[str, list[float]] = {}

    def timed(what: str, exchange: Callable[[], object]) -> None:
        group.all_gather_counts(0)
        began = time.perf_counter()
        exchange()
        seconds.setdefault(what, []).append(time.perf_counter() - began)

    generator = torch.Generator().manual_seed(load.rank)
    for count in load.tokens:
        x = torch.randn(count, load.hidden, generator=generator).bfloat16()
        scores = torch.rand(count, _NUM_EXPERTS, generator=generator)
        weights, chosen = scores.topk(load.per_token, dim=-1)
        experts.begin_step(count)
        for _ in range(load.repeat):
            timed("row of integers", lambda: group.all_gather_rows([0] * _ROW_WIDTH).wait())
            timed(f"sum, {count}", partial(group.all_reduce, x.clone()))
            for name, rule in rules.items():
                experts.rule = rule
                timed(f"{name}, {count}", partial(spread, x, chosen, weights))
    group.close()
    return {what: statistics.median(values[1:]) for what, values in seconds.items()}


def run(arguments: argparse.Namespace, size: int) -> dict[str, float]:
    """Start the ranks; return what the first one measured."""
    with open_listener("127.0.0.1") as listener:
        address = listener_address(listener)
    ranks = []
    for rank in range(size):
        load = Load(
            address,
            rank,
            size,
            arguments.hidden,
            arguments.per_token,
            arguments.tokens,
            arguments.repeat,
        )
        command = [
            sys.executable,
            "-m",
            __spec__.name,
            "--load",
            msgspec.json.encode(load).decode(),
        ]
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise SystemExit("a rank has failed")
    result: dict[str, float] = json.loads(outputs[0])
    return result


def report(arguments: argparse.Namespace) -> None:
    """Print a table per number of ranks."""
    for size in arguments.ranks:
        seconds = run(arguments, size)
        row = 1e3 * seconds["row of integers"]
        title = (
            f"{size} ranks, hidden {arguments.hidden} bf16, {arguments.per_token} experts a token"
        )
        table = Table("tokens", "sum", "all to all", "where needed", title=title)
        for count in arguments.tokens:
            names = ("sum", "all to all", "where needed")
            table.add_row(
                str(count), *(f"{1e3 * seconds[f'{name}, {count}']:.2f} ms" for name in names)
            )
        table.caption = f"a row of integers: {row:.2f} ms"
        Console().print(table)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--per-token", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        print(json.dumps(measure(msgspec.json.decode(arguments.load, type=Load))))
    else:
        report(arguments)


if __name__ == "__main__":
    main()
