"""The signals that ask a process to end in order."""

import signal


def end_signals() -> tuple[signal.Signals, ...]:
    """Return SIGTERM, SIGINT and, unless `nohup` has it ignored, SIGHUP of a closing terminal."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return signal.SIGTERM, signal.SIGINT
    return signal.SIGTERM, signal.SIGINT, signal.SIGHUP
