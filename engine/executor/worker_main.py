"""Where a tensor-parallel worker starts: its environment is set before libraries are imported."""

from engine.executor.environment import settle_environment


def main() -> int:
    """Run a worker for the engine that started this process; return the exit code."""
    settle_environment()
    from engine.executor.worker import run  # imports torch

    return run()


if __name__ == "__main__":
    raise SystemExit(main())
