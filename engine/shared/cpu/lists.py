"""Linux CPU lists (`0-3,8`), and several of them in one setting (`0-3|4-7`)."""

CpuList = tuple[int, ...]
"""Sorted CPU numbers without duplicates. Linux numbers hardware threads."""

MAX_CPUS = 8192
"""Above the largest number of CPUs that Linux supports."""

_SHOWN = 80
"""Maximum characters of a bad value quoted in an error."""


class BadCpuList(ValueError):
    """Malformed CPU list; the message is user-facing."""


def read_list(text: str) -> CpuList:
    """Parse a CPU list such as `0-3,8`.

    Raises:
        BadCpuList: the text is malformed, or names a CPU twice.
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
            raise BadCpuList(f"CPU {min(twice)} occurs twice in {_shown(text)}")
        found.update(cpus)
    return tuple(sorted(found))


def read_lists(text: str) -> tuple[CpuList, ...]:
    """Parse several CPU lists such as `0-3|4-7`.

    Raises:
        BadCpuList: a list is malformed, or a CPU is in two lists.
    """
    lists = tuple(read_list(part) for part in text.split("|"))
    owner: dict[int, int] = {}
    for number, cpus in enumerate(lists):
        for cpu in cpus:
            if owner.setdefault(cpu, number) != number:
                raise BadCpuList(f"CPU {cpu} is in two lists of {_shown(text)}")
    return lists


def list_text(cpus: CpuList) -> str:
    """Format sorted CPU numbers as `0-3,8`."""
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
    """Format several lists as `0-3|4-7`."""
    return "|".join(map(list_text, lists))


def _number(text: str, whole: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise BadCpuList(f"{_shown(whole)} is not a list of CPUs: write it as 0-3 or 0,2,8-11")
    if len(text) > len(str(MAX_CPUS)) or int(text) >= MAX_CPUS:
        raise BadCpuList(f"there is no CPU {_shown(text)}")
    return int(text)


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
