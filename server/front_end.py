"""The front-end process: HTTP server, tokenizer and engine client on one event loop."""

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import uvicorn
import uvloop
import zmq

from engine.shared.addresses import is_loopback, join_host_port
from engine.shared.cluster_keys import InsecureCluster
from engine.shared.cpu.lists import CpuList
from engine.shared.cpu.machine import bind_process
from engine.shared.fair_threads import FairThreads
from engine.shared.group_config import model_identity
from engine.shared.lifeline import CANNOT_START, CHILD_HEARTBEAT_INTERVAL, Lifeline
from engine.shared.logs import name_process
from engine.shared.messages import ClusterView, FrontEndAddresses, Hello
from engine.shared.model_files import ModelNotFound, model_directory
from engine.shared.node_directory import NodeDirectory
from engine.shared.plugins import BadPlugin, install_command
from engine.shared.pooling import BadPooling, read_pooling
from engine.shared.process_state import end_signals, freeze_heap
from engine.shared.scope import MissingRank, front_end_scope, node_name
from engine.shared.transport import (
    LARGEST_FRAME,
    Transport,
    advertised_host,
    bound_address,
    make_context,
)
from server.access.admission import REPORT_INTERVAL, RemoteTenants
from server.access.admission_table import AdmissionTable
from server.access.guards import BadGuards, tls_options
from server.answer.formats import BadFormats
from server.api.services import Services, make_services
from server.app import build_app
from server.config import FrontEndConfig
from server.control import SupervisorControl
from server.http.descriptors import grow_descriptor_table
from server.http.listener import ConnectionShare, HttpServer
from server.http.middleware import BadMiddleware
from server.http.protocol import limited_protocol
from server.media.served import placeholders_of, served_processor
from server.observe.metrics import FrontEndMetrics
from server.observe.stats_log import log_stats
from server.observe.tracing import TracingUnavailable, request_tracer
from server.router.block_index import BlockIndex
from server.router.engine_client import EngineClient
from server.router.link import ClusterLink, JoinRefused
from server.router.load_table import LoadTable
from server.router.router import Router
from server.router.routing import build_policy
from server.router.split import Split
from server.store.service import ResponseStore
from server.store.sql import SqlBackend
from server.store.sqlite import SqliteDatabase
from server.text.sampling_defaults import BadGenerationConfig
from server.text.tokenizer import ServedTokenizer, TokenizerError
from server.upstreams.routes import BadModelRoutes, ModelRoutes

if TYPE_CHECKING:
    from server.store.postgres import PostgresDatabase
    from server.upstreams.forwarder import Forwarder

logger = logging.getLogger(__name__)

_SWITCH_INTERVAL = 0.0005
"""Thread switch interval in seconds, after which other threads return the GIL to the event loop,
which reacquires it after each message: Python's 5 ms would delay all streams each time."""

GRACEFUL_SECONDS = 1
"""Seconds for connections to close after the last request has ended."""

LARGEST_OUTPUT = 16 << 20
"""Maximum bytes of a message with outputs; engines of protocol 3 send them whole."""

MAINTENANCE_INTERVAL = 1.0
"""Seconds between checks that local sockets and the store's file still exist."""


class FrontEndLaunch(msgspec.Struct, frozen=True):
    """Launch parameters that a supervisor sends to a front-end process."""

    config: FrontEndConfig
    index: int
    """Index of this front end; -1 to have the coordinator assign one."""
    incarnation: int
    socket_dir: str = ""
    """Private directory for this node's local sockets; empty: a directory of this process."""
    slot: int = 0
    """Index among its node's front ends; its row in their shared tables."""
    listen_fd: int | None = None
    """Listening HTTP socket that the supervisor bound, shared by all front ends."""
    control: str | None = None
    """Address of the supervisor's control socket."""
    engines_may_wait: bool = False
    """Whether the supervisor's engines may wait for resources of a cluster."""
    load_table: str | None = None
    """Path of the table in which the front ends of a node share load they have sent to engines."""
    admission_table: str | None = None
    """Directory of the table in which they count requests that the node has accepted."""
    cpus: CpuList = ()
    """CPUs to bind the process to; empty: any."""
    replaced: dict[str, int] = {}
    """Number of previous processes in its place, by outcome: "died" or "hung"."""


class FrontEnd:
    """Assembles a front end, serves, and shuts it down."""

    def __init__(self, launch: FrontEndLaunch, lifeline: Lifeline) -> None:
        self._launch = launch
        self._config = launch.config
        self._lifeline = lifeline
        self._scope = front_end_scope(self._config.parallel, self._config.cluster)
        self._context: zmq.Context[zmq.Socket[bytes]] = make_context()
        self._transport = Transport(self._config.cluster, self._context)
        self._host = advertised_host(self._config.cluster)
        self._requests = self._bind(zmq.ROUTER, "requests")
        self._outputs = self._bind(zmq.PULL, "outputs", LARGEST_OUTPUT)

    def _bind(self, kind: int, name: str, largest: int = LARGEST_FRAME) -> "zmq.Socket[bytes]":
        coordinator = self._config.cluster.coordinator_address
        if coordinator.startswith("tcp://"):
            interface = self._host if is_loopback(self._host) else "*"
            address = f"tcp://{join_host_port(interface, '*')}"
            return self._transport.bind(kind, address, largest=largest)
        path = Path(self._launch.socket_dir) / f"{self._launch.incarnation:x}-{name}"
        return self._transport.bind(kind, f"ipc://{path}", largest=largest)

    async def run(self) -> None:
        """Serve until a signal arrives."""
        tracer = request_tracer(self._config.http.otlp_traces_endpoint)
        threads = min(32, (os.cpu_count() or 1) + 4)  # the default of `ThreadPoolExecutor`
        asyncio.get_running_loop().set_default_executor(FairThreads(threads, "front end"))
        self._lifeline.progress("loading the tokenizer")
        model = await asyncio.to_thread(model_directory, self._config.model, weights=False)
        processor = None if self._config.model.language_model_only else served_processor(model)
        tokenizer = ServedTokenizer.load(model, self._config.model, placeholders_of(processor))
        pooling = read_pooling(model, self._config.model)
        link = self._link(await asyncio.to_thread(model_identity, self._config.model))
        self._lifeline.progress("waiting for the coordinator")
        index = await link.join()
        if self._launch.index < 0:
            log = self._config.log
            name_process(f"api {index}", log.log_level, log.log_format)
        metrics = FrontEndMetrics(self._config, self._launch.slot)
        metrics.replaces(self._launch.replaced)
        client = EngineClient(
            front_end=index,
            router=self._router(index, metrics),
            metrics=metrics,
            notify=link.notify,
            requests=self._requests,
            outputs=self._outputs,
            min_ready_engines=self._config.routing.min_ready_engines,
            cold_start_timeout=self._config.routing.cold_start_timeout,
        )

        rows = self._launch.admission_table
        table = (
            AdmissionTable(None) if rows is None else AdmissionTable(Path(rows), self._launch.slot)
        )
        remote_tenants = (
            RemoteTenants(table, index, self._launch.incarnation)
            if self._config.tenants.has_limits
            else None
        )

        def view_changed(view: ClusterView) -> None:
            client.view_changed(view)
            if remote_tenants is not None:
                remote_tenants.take(view, time.monotonic())
            link.remember(client.adapters.table, client.fleet)

        link.subscribe(view_changed)
        address, may_wait = self._launch.control, self._launch.engines_may_wait
        control = (
            None
            if address is None
            else SupervisorControl(address, self._transport, engines_may_wait=may_wait)
        )
        forwarder = self._forwarder(metrics)
        store = await asyncio.to_thread(self._store, metrics)  # may wait for other writers
        tasks = [
            asyncio.create_task(each)
            for each in self._background_work(client, store, link, remote_tenants, metrics)
        ]
        try:
            services = make_services(
                self._config,
                client,
                tokenizer,
                metrics,
                table=table,
                control=control,
                tracer=tracer,
                store=store,
                pooling=pooling,
                processor=processor,
                forwarder=forwarder,
                remote_tenants=remote_tenants,
            )
            await self._serve_http(services, link, client)
        finally:
            for task in tasks:
                task.cancel()
            if control is not None:
                control.close()
            if store is not None:
                await store.jobs.close()
            if forwarder is not None:
                await forwarder.close()
            link.close()
            client.close()
            if store is not None:
                await asyncio.to_thread(store.close)
            if tracer is not None:
                await asyncio.to_thread(tracer.close)

    def _background_work(
        self,
        client: EngineClient,
        store: ResponseStore | None,
        link: ClusterLink,
        remote_tenants: RemoteTenants | None,
        metrics: FrontEndMetrics,
    ) -> Iterator[Coroutine[Any, Any, None]]:
        yield _every(MAINTENANCE_INTERVAL, self._transport.maintain)
        yield self._beat(metrics)
        if store is not None and self._config.store.response_store == "node":
            yield _every(MAINTENANCE_INTERVAL, store.maintain)
        if remote_tenants is not None:
            yield _every(REPORT_INTERVAL, partial(_report_tenants, remote_tenants, link))
        interval = self._config.http.log_stats_interval
        if interval and not self._launch.slot:
            yield log_stats(client, interval)

    async def _beat(self, metrics: FrontEndMetrics) -> None:
        while True:
            self._lifeline.heartbeat()
            due = time.monotonic() + CHILD_HEARTBEAT_INTERVAL
            await asyncio.sleep(CHILD_HEARTBEAT_INTERVAL)
            metrics.observe("event_loop_lag_seconds", max(0.0, time.monotonic() - due))

    def _link(self, identity: dict[str, str]) -> ClusterLink:
        cluster, host = self._config.cluster, self._host
        return ClusterLink(
            Hello(
                kind="front_end",
                index=self._launch.index,
                incarnation=self._launch.incarnation,
                host=node_name(cluster),
                pid=os.getpid(),
                group_config=identity,
                addresses=FrontEndAddresses(
                    bound_address(self._requests, host), bound_address(self._outputs, host)
                ),
                scope=self._scope,
                group=cluster.engine_group,
            ),
            cluster.coordinator_address,
            cluster.heartbeat_interval,
            self._transport,
        )

    def _forwarder(self, metrics: FrontEndMetrics) -> "Forwarder | None":
        if self._config.http.model_routes is None:
            return None
        from server.upstreams.forwarder import Forwarder  # slow: imports an HTTP client

        return Forwarder(ModelRoutes(self._config.http.model_routes), metrics)

    def _store(self, metrics: FrontEndMetrics) -> ResponseStore | None:
        config = self._config.store
        if config.response_store == "none":
            return None
        database: SqliteDatabase | PostgresDatabase
        if config.is_postgres:
            try:
                from server.store import postgres
            except ImportError as error:
                how = install_command("postgres")
                raise OSError(
                    f"--response-store of PostgreSQL needs its client ({error}): {how}"
                ) from error
            database = postgres.PostgresDatabase(config.response_store)
        elif config.response_store == "node":
            path = Path(self._launch.socket_dir) / "responses.sqlite"
            database = SqliteDatabase(path, lasting=False)
        else:
            path = Path(config.response_store).expanduser()
            database = SqliteDatabase(path, lasting=True)
        limits = config.response_store_bytes, config.response_store_age
        evicted = partial(metrics.count, "response_store_evictions")
        backend = SqlBackend(database, *limits, evicted)
        metrics.store_usage = lambda: (backend.total, backend.max_bytes)
        return ResponseStore(backend)

    def _router(self, index: int, metrics: FrontEndMetrics) -> Router:
        table = None
        if self._launch.load_table is not None:
            table = LoadTable(Path(self._launch.load_table), self._launch.slot)
        config, routing = self._config, self._config.routing
        blocks = None
        if routing.routing_policy == "prefix-aware":
            blocks = BlockIndex(index, routing.routing_index_blocks)
            metrics.index_size = blocks.size
        return Router(
            front_end=index,
            incarnation=self._launch.incarnation,
            first_id=secrets.randbits(42) << 20,
            policy=build_policy(routing.routing_policy, index),
            table=table,
            grace=config.cluster.engine_timeout,
            max_resumes=routing.max_resumes,
            resume_timeout=routing.resume_timeout,
            halted_timeout=routing.halted_timeout,
            scope=self._scope,
            num_ranks=config.parallel.data_parallel_size,
            index=blocks,
            split=Split(routing.prefill_split_length, build_policy(routing.routing_policy, index)),
        )

    async def _serve_http(
        self, services: Services, link: ClusterLink, client: EngineClient
    ) -> None:
        http, max_body_bytes = self._config.http, services.body_limits.max_bytes
        guards = msgspec.structs.replace(self._config.guards, max_body_bytes=max_body_bytes)
        table, forwarder = services.admission.table, services.forwarder
        share = ConnectionShare(table) if table.has_neighbours else None
        server = HttpServer(
            uvicorn.Config(
                build_app(services),
                host=http.host,
                port=http.port,
                uds=http.uds,
                loop="none",
                http=limited_protocol(guards, share.changed if share else lambda _: None),
                timeout_keep_alive=guards.keep_alive_timeout,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                backlog=2048,
                timeout_graceful_shutdown=GRACEFUL_SECONDS,
                **tls_options(guards),
            ),
            guards.receive_timeout,
            share,
        )
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()

        def stop_or_force(signum: int) -> None:
            # The first signal drains, the second ends at once. SIGHUP only drains: a closing
            # terminal can send it more than once.
            if stop.is_set() and signum != signal.SIGHUP:
                os._exit(1)
            stop.set()

        for signum in end_signals():
            loop.add_signal_handler(signum, stop_or_force, signum)
        sockets = None
        if self._launch.listen_fd is not None:
            sockets = [socket.socket(fileno=self._launch.listen_fd)]
        serving = asyncio.create_task(server.serve(sockets))
        stopping = asyncio.create_task(stop.wait())
        over: list[asyncio.Future[Any]] = [serving, stopping, link.replaced]
        ready = asyncio.create_task(client.wait_until_ready())
        self._lifeline.progress("waiting for an engine")
        await asyncio.wait([*over, ready], return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            freeze_heap()
            link.ready()
            self._lifeline.ready(f"serving on {guards.scheme}://{http.address}")
        ready.cancel()
        await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not link.replaced.done():
            server.end_connections()
            ends_at = loop.time() + http.shutdown_timeout
            cut_off = await client.drain(http.shutdown_timeout)
            if cut_off:
                logger.warning("%d sequences did not end within --shutdown-timeout", cut_off)
            # Forwarded requests may continue; those of engines have ended and only need answers.
            await server.answered(max(ends_at - loop.time(), GRACEFUL_SECONDS))
            if forwarder is not None:
                await forwarder.close()
        server.should_exit = True
        await serving
        if link.replaced.done():
            raise JoinRefused(link.replaced.result())


def _report_tenants(remote_tenants: RemoteTenants, link: ClusterLink) -> None:
    notice = remote_tenants.notice(time.monotonic())
    if notice is not None:
        link.notify(notice)


async def _every(seconds: float, work: Callable[[], Awaitable[None] | None]) -> None:
    while True:
        await asyncio.sleep(seconds)
        waiting = work()
        if waiting is not None:
            await waiting


def run(launch: FrontEndLaunch, lifeline: Lifeline) -> int:
    """Run a front end until a signal arrives and return the exit code."""
    if not launch.socket_dir:
        try:
            directory = NodeDirectory(launch.config.cluster.socket_dir)
        except OSError as error:
            lifeline.failed(str(error))
            return CANNOT_START
        with directory:
            return run(msgspec.structs.replace(launch, socket_dir=str(directory.path)), lifeline)
    name = f"api {launch.index}" if launch.index >= 0 else "api"
    name_process(name, launch.config.log.log_level, launch.config.log.log_format)
    bind_process(launch.cpus)
    grow_descriptor_table()
    lifeline.watch()
    sys.setswitchinterval(_SWITCH_INTERVAL)
    try:
        uvloop.run(FrontEnd(launch, lifeline).run())
    except (
        JoinRefused,
        ModelNotFound,
        TokenizerError,
        BadGenerationConfig,
        InsecureCluster,
        MissingRank,
        TracingUnavailable,
        BadGuards,
        BadFormats,
        BadMiddleware,
        BadPlugin,
        BadPooling,
        BadModelRoutes,
        OSError,
    ) as error:
        lifeline.failed(str(error))
        return CANNOT_START
    return 0
