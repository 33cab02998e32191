"""Hints about missing packages work in the environment that prints them."""

import shlex
import sys

import pytest
from packaging.requirements import Requirement

from engine.shared.plugins import install_command


@pytest.mark.parametrize(
    ("extra", "package"),
    [("plot", "matplotlib"), ("ray", "ray"), ("transformers", "transformers"),
     ("postgres", "psycopg"), ("otel", "opentelemetry-sdk")],
)  # fmt: skip
def test_the_command_installs_the_packages_themselves(extra: str, package: str) -> None:
    words = shlex.split(install_command(extra))
    assert words[:4] == [sys.executable, "-m", "pip", "install"]
    assert package in {Requirement(word).name for word in words[4:]}
