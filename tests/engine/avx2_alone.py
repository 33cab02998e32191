"""An x86 processor with AVX2 alone: no arithmetic for 16-bit floats, and oneDNN packs none."""

from typing import Any, NoReturn

import pytest

from engine.models.products import blocked, converted, dense


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have products be prepared as on such a processor."""
    pack_nothing(monkeypatch)
    monkeypatch.setattr(converted, "float32_is_faster", lambda: True)
    blocked._sums_are_right.cache_clear()


def pack_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no weights be packed, as where oneDNN refuses them."""
    monkeypatch.setattr(dense, "_packable", {})
    monkeypatch.setattr(dense, "PackedLinear", _cannot_pack)


def _cannot_pack(*_: Any) -> NoReturn:
    raise RuntimeError("bf16 path needs the cpu support avx512")
