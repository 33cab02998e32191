"""Lists of CPUs as Linux writes them (`0-3,8`), and several of them in one setting (`0-3|4-7`)."""

CpuList = tuple[int, ...]
"""Numbers of CPUs, in order, each once. Linux numbers hardware threads."""

MAX_CPUS = 8192
"""More than Linux can number."""

_SHOWN = 80
"""Characters of a bad value that are repeated to whoever gave it."""


class BadCpuList(ValueError):
    """Text that is no list of CPUs; the message says why, for people."""


def read_list(text: str) -> CpuList:
    """Return the CPUs that `0-3,8` names.

    Raises:
        BadCpuList: it is none, or names a CPU twice.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = (each.strip() for each in part.partition("-"))
        low = _number(first, text)
        high = _number(last, text) if dash else low
        if high < low:
            raise BadCpuList(f"{_shown(part)} ends before it begins")
        cpus = range(low, high + 1)
        if twice := found.intersection(cpus):
            raise BadCpuList(f"CPU {min(twice)} is in {_shown(text)} twice")
        found.update(cpus)
    return tuple(sorted(found))


def read_lists(text: str) -> tuple[CpuList, ...]:
    """Return the lists that `0-3|4-7` holds.

    Raises:
        BadCpuList: one of them is none, or a CPU is in two of them.
    """
    lists = tuple(read_list(part) for part in text.split("|"))
    owner: dict[int, int] = {}
    for number, cpus in enumerate(lists):
        for cpu in cpus:
            if owner.setdefault(cpu, number) != number:
                raise BadCpuList(f"CPU {cpu} is in two lists of {_shown(text)}")
    return lists


def list_text(cpus: CpuList) -> str:
    """Return `0-3,8` for CPUs in order."""
    parts: list[str] = []
    first = last = -1
    for cpu in (*cpus, -1):
        if cpu == last + 1 and first >= 0:
            last = cpu
            continue
        if first >= 0:
            parts.append(str(first) if first == last else f"{first}-{last}")
        first = last = cpu
    return ",".join(parts)


def lists_text(lists: tuple[CpuList, ...]) -> str:
    """Return `0-3|4-7` for several lists."""
    return "|".join(map(list_text, lists))


def _number(text: str, whole: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise BadCpuList(f"{_shown(whole)} is no list of CPUs: write it as 0-3 or 0,2,8-11")
    if len(text) > len(str(MAX_CPUS)) or int(text) >= MAX_CPUS:
        raise BadCpuList(f"there is no CPU {_shown(text)}")
    return int(text)


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
