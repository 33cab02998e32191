"""`python -m server.template_main`: the template of a node's front ends."""

import importlib

from engine.shared.template import TemplateLaunch, run


def load(_: TemplateLaunch) -> None:
    """Import what front ends import."""
    importlib.import_module("server.front_end")


if __name__ == "__main__":
    run("server", load)
