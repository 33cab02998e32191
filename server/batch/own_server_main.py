"""The `swell` command until standard input is closed: by whoever wants it, or its death."""

import os
import signal
import sys
import threading

from server.cli import main


def _wait_for_the_end() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_wait_for_the_end, daemon=True).start()
    sys.exit(main())
