"""An engine's worker process on a simulated AVX2-only processor (`tests.engine.avx2_alone`)."""

import pytest

from engine.executor.worker_main import begin


def main() -> int:
    """Run the worker like `engine.executor.worker_main`."""
    launch, lifeline = begin()
    from engine.executor.worker import run  # imports torch
    from tests.engine import avx2_alone

    with pytest.MonkeyPatch.context() as monkeypatch:
        avx2_alone.pretend(monkeypatch)
        return run(launch, lifeline)


if __name__ == "__main__":
    raise SystemExit(main())
