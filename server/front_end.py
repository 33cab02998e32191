"""The front-end process: HTTP server, tokenizer and engine client on one event loop."""

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
import time
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
from engine.shared.end_signals import end_signals
from engine.shared.extras import install_command
from engine.shared.fair_threads import FairThreads
from engine.shared.group_config import model_identity
from engine.shared.heap import settle_heap
from engine.shared.lifeline import CANNOT_START, TURN_INTERVAL, Lifeline
from engine.shared.logs import name_process
from engine.shared.membership import Identity
from engine.shared.messages import ClusterView, FrontEndAddresses
from engine.shared.model_files import ModelNotFound, model_directory
from engine.shared.node_directory import NodeDirectory
from engine.shared.plugins import BadPlugin
from engine.shared.pooling import BadPooling, read_pooling
from engine.shared.scope import MissingRank, front_end_scope, node_name
from engine.shared.transport import (
    LARGEST_FRAME,
    Transport,
    advertised_host,
    bound_address,
    make_context,
)
from server.access.admission_table import AdmissionTable
from server.access.guards import BadGuards, tls_options
from server.access.tenants_elsewhere import SAY_INTERVAL, TenantsElsewhere
from server.answer.formats import BadFormats
from server.api.services import Services, make_services
from server.app import build_app
from server.config import FrontEndConfig
from server.control import SupervisorControl
from server.http.acceptor import ConnectionShare
from server.http.descriptors import make_room_for_descriptors
from server.http.listener import HttpServer
from server.http.own_middleware import BadMiddleware
from server.http.protocol import limited_protocol
from server.media.served import placeholders_of, served_processor
from server.observe.metrics import FrontEndMetrics
from server.observe.stats_log import log_stats
from server.observe.tracing import TracingUnavailable, request_tracer
from server.router.block_index import BlockIndex
from server.router.engine_client import EngineClient
from server.router.link import ClusterLink, JoinRefused
from server.router.load_table import LoadTable
from server.router.router import Router, build_router
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
"""Seconds after which other threads give the interpreter back to the event loop, which asks for it
after each message that it sends or receives: Python's 5 ms would hold up all streams each time."""

GRACEFUL_SECONDS = 1
"""How long connections may take to be closed after the last request has ended."""

LARGEST_OUTPUT = 16 << 20
"""Bytes of a message with outputs; engines of protocol 3 send them whole."""

MEND_INTERVAL = 1.0
"""Seconds between looks at whether local sockets and the store's file are still there."""


class FrontEndLaunch(msgspec.Struct, frozen=True):
    """What the supervisor tells a front-end process at its start."""

    config: FrontEndConfig
    index: int
    """Number of this front end; -1 to be given one by the coordinator."""
    incarnation: int
    socket_dir: str
    """Private directory for this node's local sockets; empty: one of this process's own."""
    place: int = 0
    """Which of its node's front ends this is; its row in the tables that they share."""
    listen_fd: int | None = None
    """Listening HTTP socket that the supervisor bound, shared by all front ends."""
    control: str | None = None
    """Address of the supervisor's control socket."""
    engines_may_wait: bool = False
    """Whether the supervisor's engines may wait for resources of a cluster."""
    load_table: str | None = None
    """Path of the table in which the front ends of this node see each other's sends."""
    admission_table: str | None = None
    """Directory of the table in which they count what the node has taken on."""
    cpus: CpuList = ()
    """What it runs on; empty: any."""
    replaced: dict[str, int] = {}
    """How many processes were in its place before, by what became of them: "died" or "hung"."""


class FrontEnd:
    """Wires one front end together, serves, and takes it apart."""

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
        """Serve until a signal."""
        tracer = request_tracer(self._config.http.otlp_traces_endpoint)
        threads = min(32, (os.cpu_count() or 1) + 4)  # as many as a loop makes by default
        asyncio.get_running_loop().set_default_executor(FairThreads(threads, "front end"))
        self._lifeline.progress("loading the tokenizer")
        model = await asyncio.to_thread(model_directory, self._config.model, weights=False)
        language_model_only = self._config.model.language_model_only
        processor = None if language_model_only else served_processor(model)
        tokenizer = ServedTokenizer.load(model, self._config.model, placeholders_of(processor))
        pooling = read_pooling(model, self._config.model)
        link = self._link(await asyncio.to_thread(model_identity, self._config.model))
        self._lifeline.progress("waiting for the coordinator")
        index = await link.join()
        if self._launch.index < 0:
            log = self._config.log
            name_process(f"api {index}", log.log_level, log.log_format)
        metrics = FrontEndMetrics(self._config, self._launch.place)
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

        table = self._admission()
        elsewhere = self._tenants_elsewhere(table, index)

        def view_changed(view: ClusterView) -> None:
            client.view_changed(view)
            if elsewhere is not None:
                elsewhere.take(view, time.monotonic())
            link.know(client.adapters.sheet, client.fleet)

        link.subscribe(view_changed)
        control = self._control()
        forwarder = _forwarder(self._config.http.model_routes, metrics)
        store = await asyncio.to_thread(self._store, metrics)  # others may be writing
        tasks = self._background_tasks(client, store, link, elsewhere, metrics)
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
                elsewhere=elsewhere,
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

    def _background_tasks(
        self,
        client: EngineClient,
        store: ResponseStore | None,
        link: ClusterLink,
        elsewhere: TenantsElsewhere | None,
        metrics: FrontEndMetrics,
    ) -> list[asyncio.Task[None]]:
        work = (self._mend_sockets(), self._turn(metrics))
        tasks = [asyncio.create_task(each) for each in work]
        if store is not None and self._config.store.response_store == "node":
            tasks.append(asyncio.create_task(_mend_store(store)))
        if elsewhere is not None:
            tasks.append(asyncio.create_task(_tell_of_tenants(elsewhere, link)))
        interval = self._config.http.log_stats_interval
        if interval and not self._launch.place:
            tasks.append(asyncio.create_task(log_stats(client, interval)))
        return tasks

    def _control(self) -> SupervisorControl | None:
        if self._launch.control is None:
            return None
        return SupervisorControl(
            self._launch.control,
            self._transport,
            engines_may_wait=self._launch.engines_may_wait,
        )

    async def _turn(self, metrics: FrontEndMetrics) -> None:
        while True:
            self._lifeline.turn()
            due = time.monotonic() + TURN_INTERVAL
            await asyncio.sleep(TURN_INTERVAL)
            metrics.observe("event_loop_lag_seconds", max(0.0, time.monotonic() - due))

    async def _mend_sockets(self) -> None:
        while True:
            await asyncio.sleep(MEND_INTERVAL)
            self._transport.mend()

    def _link(self, identity: dict[str, str]) -> ClusterLink:
        cluster, host = self._config.cluster, self._host
        return ClusterLink(
            Identity(
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

    def _admission(self) -> AdmissionTable:
        directory = self._launch.admission_table
        if directory is None:
            return AdmissionTable(None)
        return AdmissionTable(Path(directory), self._launch.place)

    def _tenants_elsewhere(self, table: AdmissionTable, index: int) -> TenantsElsewhere | None:
        if not self._config.tenants.has_limits:
            return None
        return TenantsElsewhere(table, index, self._launch.incarnation)

    def _store(self, metrics: FrontEndMetrics) -> ResponseStore | None:
        config = self._config.store
        if config.response_store == "none":
            return None
        database: SqliteDatabase | PostgresDatabase
        if config.is_postgres:
            database = _postgres(config.response_store)
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
            table = LoadTable(Path(self._launch.load_table), self._launch.place)
        config, routing = self._config, self._config.routing
        blocks = None
        if routing.routing_policy == "prefix-aware":
            blocks = BlockIndex(index, routing.routing_index_blocks)
            metrics.index_size = blocks.size
        return build_router(
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
        for signum in end_signals():
            loop.add_signal_handler(signum, _stop_or_force, stop, signum)
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
            settle_heap()
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
            # Other servers may go on answering; what engines have not is over, and only to be told.
            await server.answered(max(ends_at - loop.time(), GRACEFUL_SECONDS))
            if forwarder is not None:
                await forwarder.close()
        server.should_exit = True
        await serving
        if link.replaced.done():
            raise JoinRefused(link.replaced.result())


async def _tell_of_tenants(elsewhere: TenantsElsewhere, link: ClusterLink) -> None:
    while True:
        await asyncio.sleep(SAY_INTERVAL)
        notice = elsewhere.notice(time.monotonic())
        if notice is not None:
            link.notify(notice)


async def _mend_store(store: ResponseStore) -> None:
    while True:
        await asyncio.sleep(MEND_INTERVAL)
        await store.mend()


def _forwarder(routes: str | None, metrics: FrontEndMetrics) -> "Forwarder | None":
    """Return what serves the models of other servers, if a file says which there are.

    Raises:
        BadModelRoutes: the file cannot be used.
    """
    if routes is None:
        return None
    from server.upstreams.forwarder import Forwarder  # an HTTP client takes long to import

    return Forwarder(ModelRoutes(routes), metrics)


def _postgres(url: str) -> "PostgresDatabase":
    """Return a PostgreSQL database for responses.

    Raises:
        OSError: its driver is not installed, or the database cannot be used.
    """
    try:
        from server.store.postgres import PostgresDatabase
    except ImportError as error:
        how = install_command("postgres")
        raise OSError(
            f"--response-store of PostgreSQL needs its client ({error}): {how}"
        ) from error
    return PostgresDatabase(url)


def _stop_or_force(stop: asyncio.Event, signum: int) -> None:
    """Drain at the first signal, end at once at the second.

    SIGHUP only drains: a terminal that closes may send it more than once.
    """
    if stop.is_set() and signum != signal.SIGHUP:
        os._exit(1)
    stop.set()


def run(launch: FrontEndLaunch, lifeline: Lifeline) -> int:
    """Run one front end until a signal and return the exit code."""
    if not launch.socket_dir:
        return _run_in_own_directory(launch, lifeline)
    name = f"api {launch.index}" if launch.index >= 0 else "api"
    name_process(name, launch.config.log.log_level, launch.config.log.log_format)
    bind_process(launch.cpus)
    make_room_for_descriptors()
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


def run_standalone(config: FrontEndConfig) -> int:
    """Run `swell api-server`: one front end that another process did not launch."""
    launch = FrontEndLaunch(
        config=config, index=-1, incarnation=secrets.randbits(48), socket_dir=""
    )
    return run(launch, Lifeline(None))


def _run_in_own_directory(launch: FrontEndLaunch, lifeline: Lifeline) -> int:
    try:
        directory = NodeDirectory(launch.config.cluster.socket_dir)
    except OSError as error:
        lifeline.failed(str(error))
        return CANNOT_START
    with directory:
        return run(msgspec.structs.replace(launch, socket_dir=str(directory.path)), lifeline)
