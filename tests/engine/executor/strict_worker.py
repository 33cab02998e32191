"""An engine's worker process on a simulated device (`strict_device`)."""

from engine.executor.worker_main import begin


def main() -> int:
    """Run the worker like `engine.executor.worker_main`."""
    launch, lifeline = begin()
    from engine.executor.worker import run  # imports torch
    from tests.engine.distributed import strict_device

    strict_device.install()
    strict_device.replace_processors()
    return run(launch, lifeline)


if __name__ == "__main__":
    raise SystemExit(main())
