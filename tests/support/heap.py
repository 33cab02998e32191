"""Keeps Python's garbage collector from looking through all tests again and again."""

import gc
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected, and exempt for good what was made by then.

    Thousands of tests and the libraries under test are some millions of objects that stay as long
    as the process: to look through them is a fifth of what starting a process of tests costs.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
