"""Lists of CPUs, as Linux and people write them."""

import random

import pytest

from engine.shared.config import ExecutorConfig
from engine.shared.cpu.lists import (
    MAX_CPUS,
    BadCpuList,
    list_text,
    lists_text,
    read_list,
    read_lists,
)


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0", (0,)),
        ("0-3", (0, 1, 2, 3)),
        ("8,0-2", (0, 1, 2, 8)),
        (" 4 - 5 , 7 ", (4, 5, 7)),
        (str(MAX_CPUS - 1), (MAX_CPUS - 1,)),
    ],
)
def test_cpu_list_is_read(text: str, cpus: tuple[int, ...]) -> None:
    assert read_list(text) == cpus


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not a list of CPUs"),
        ("0-", "not a list of CPUs"),
        ("-1", "not a list of CPUs"),
        ("0,,1", "not a list of CPUs"),
        ("a", "not a list of CPUs"),
        ("0-3:2", "not a list of CPUs"),
        ("\u0663", "not a list of CPUs"),
        ("3-1", "ends before it begins"),
        ("0-3,2", "CPU 2 occurs twice in 0-3,2"),
        (str(MAX_CPUS), f"no CPU {MAX_CPUS}"),
        ("0-99999999999999", "no CPU 99999999999999"),
        ("0|", "not a list of CPUs"),
        ("0-3|3-5", "CPU 3 is in two lists"),
    ],
)
def test_invalid_list_is_refused_by_flag_name(text: str, complaint: str) -> None:
    with pytest.raises(BadCpuList, match=complaint):
        read_lists(text)
    with pytest.raises(ValueError, match=f"--cpu-bind .*{complaint}"):
        ExecutorConfig(cpu_bind=text)


def test_long_list_is_neither_echoed_nor_expanded() -> None:
    with pytest.raises(BadCpuList) as refused:
        read_lists(",".join(["0-8191"] * 10_000))
    assert len(str(refused.value)) < 200


def test_written_list_is_read_back() -> None:
    draw = random.Random(1)
    for _ in range(1000):
        cpus = draw.sample(range(64), draw.randint(1, 40))
        cut = draw.randint(0, len(cpus) - 1)
        lists = tuple(tuple(sorted(part)) for part in (cpus[:cut], cpus[cut:]) if part)
        assert read_lists(lists_text(lists)) == lists
        assert list_text(read_list(list_text(lists[0]))) == list_text(lists[0])


def test_auto_and_none_list_no_cpus() -> None:
    assert ExecutorConfig().cpu_bind == "auto"
    assert ExecutorConfig().bound_to == ExecutorConfig(cpu_bind="none").bound_to == ()
    assert ExecutorConfig(cpu_bind="0-1|3").bound_to == ((0, 1), (3,))
