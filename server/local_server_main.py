"""The `swell` command as a child that exits when its parent closes standard input or dies."""

import os
import signal
import sys
import threading

from server.cli import main


def _wait_for_the_end() -> None:
    # Not through sys.stdin, whose lock this thread would hold at interpreter shutdown.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_wait_for_the_end, daemon=True).start()
    sys.exit(main())
