"""Engines that wait for resources of a cluster, as their supervisor tells at every scrape."""

import asyncio

from prometheus_client.core import GaugeMetricFamily

from engine.shared.messages import ControlQuery
from engine.shared.model_files import served_names
from server.config import FrontEndConfig
from server.fleet.control import SupervisorControl, SupervisorSilent
from server.observe.exposition import text_of

WITHIN = 1.0
"""Seconds that a scrape waits for the supervisor."""


class WaitingEngines:
    """Asks the supervisor, which alone knows of engines that have not been started yet.

    Args:
        control: None where no supervisor is.
    """

    def __init__(self, config: FrontEndConfig, control: SupervisorControl | None) -> None:
        self._name = config.http.metrics_prefix + "engine_waiting_for_resources"
        self._model_name = served_names(config.model)[0]
        self._control = control

    async def exposed(self) -> bytes:
        """Return the metric in Prometheus text format; nothing if no engine waits."""
        if self._control is None or not self._control.engines_may_wait:
            return b""
        try:
            async with asyncio.timeout(WITHIN):
                status = await self._control.ask(ControlQuery())
        except (SupervisorSilent, TimeoutError):
            return b""
        if not status.waiting:
            return b""
        text = "1 for each engine that is not started, for want of these resources of the cluster."
        family = GaugeMetricFamily(self._name, text, labels=("model_name", "engine", "resources"))
        for engine, resources in status.waiting.items():
            family.add_metric((self._model_name, engine, resources), 1.0)
        return text_of([family])
