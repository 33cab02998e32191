"""Logging of every process: one line an event, on standard error."""

import logging

import setproctitle


def name_process(name: str, log_level: str) -> None:
    """Show the process as `swell: NAME` in the process list and set up its logging."""
    setproctitle.setproctitle(f"swell: {name}")
    logging.basicConfig(
        level=log_level.upper(),
        format=f"%(asctime)s.%(msecs)03d %(levelname)-7s [{name}] %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
