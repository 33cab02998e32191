"""`python -m server.template_main`: the template process from which front ends are forked."""

import importlib

from engine.shared.template import TemplateLaunch, run


def load(_: TemplateLaunch) -> None:
    """Import the modules that front ends need."""
    importlib.import_module("server.front_end")


if __name__ == "__main__":
    run("server", load)
