"""`swell run-batch`: runs in this process if a single local engine suffices."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI

from engine.process.main import CannotStart
from engine.shared import settings
from server.batch import command
from server.batch.config import RunBatchConfig
from server.config import ServeConfig
from server.fleet.own_server import ServerFailed, shared_settings
from swell.llm import AsyncLLM, why_not_here


def run_batch(config: RunBatchConfig) -> int:
    """Run a batch; return the exit code."""
    options = {setting.name: value for setting, value in shared_settings(config)}
    if why_not_here(settings.load(ServeConfig, options, {})) is not None:
        return command.run_batch(config)
    return command.run_batch(config, partial(_endpoints, options))


@asynccontextmanager
async def _endpoints(options: dict[str, Any]) -> AsyncIterator[FastAPI]:
    """Provide the endpoints of a model in this process.

    Raises:
        ServerFailed: the model cannot be loaded.
    """
    try:
        llm = await AsyncLLM.start(**options)
    except (CannotStart, ValueError) as error:
        raise ServerFailed(str(error)) from error
    async with llm:
        yield llm.app
