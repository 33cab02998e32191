"""Simulates an x86 processor with only AVX2: no 16-bit float arithmetic or oneDNN packing."""

from typing import Any, NoReturn

import pytest

from engine.models.products import blocked, converted, dense


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare products as on such a processor."""
    pack_nothing(monkeypatch)
    monkeypatch.setattr(converted, "float32_is_faster", lambda: True)
    blocked._sums_are_right.cache_clear()


def pack_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable weight packing, as if oneDNN did not support it."""
    monkeypatch.setattr(dense, "_packable", {})
    monkeypatch.setattr(dense, "PackedLinear", _cannot_pack)


def _cannot_pack(*_: Any) -> NoReturn:
    raise RuntimeError("bf16 path needs the cpu support avx512")
