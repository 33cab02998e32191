"""Full file systems: data shared between processes is in memory."""

import subprocess
import sys
from pathlib import Path

from engine.shared.node_directory import NodeDirectory
from server.config import ServeConfig, SupervisorConfig
from server.fleet.roles import front_end_roles
from tests.support.disks import fill, small_disk
from tests.support.waiting import PATIENCE

_MAPS_MORE = """
import os, sys
from pathlib import Path

directory = Path(sys.argv[1])
os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(directory / "metrics")
from server.access.admission_table import TENANT_SLOTS, AdmissionTable
from server.config import FrontEndConfig
from server.observe.metrics import FrontEndMetrics
from server.router.load_table import MAX_ENGINES, LoadTable, Sent

loads = LoadTable(directory / "loads", 0)
for rank in range(MAX_ENGINES):
    loads.publish(rank, Sent(1, 1, 1, 1))
table = AdmissionTable(directory / "admission", 0)
for slot in range(TENANT_SLOTS):
    table.add(1, 1, slot)
metrics = FrontEndMetrics(FrontEndConfig(), 0)
for number in range(2000):
    metrics.count("http_requests", f"/{number}", 200)
print("alive")
"""


def test_a_full_file_system_kills_no_process_that_maps_shared_files(tmp_path: Path) -> None:
    """On a full disk, the first write to an unallocated page raises SIGBUS."""
    config = ServeConfig(supervisor=SupervisorConfig(api_server_count=1))
    with small_disk(tmp_path / "disk") as disk, NodeDirectory(str(disk / "node")) as node:
        fill(disk)
        front_end_roles(config, node, 0, numbered=True, scalable=True)
        program = [sys.executable, "-c", _MAPS_MORE, str(node.path)]
        done = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_a_scrape_reads_the_files_of_front_ends_that_have_not_started(tmp_path: Path) -> None:
    config = ServeConfig(supervisor=SupervisorConfig(api_server_count=2))
    with NodeDirectory(str(tmp_path / "node")) as node:
        front_end_roles(config, node, 0, numbered=True, scalable=True)
        program = [sys.executable, "-c", _SCRAPES, str(node.path)]
        done = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert 'http_requests_total{endpoint="/v1/models"' in done.stdout


_SCRAPES = """
import os, sys

os.environ["PROMETHEUS_MULTIPROC_DIR"] = f"{sys.argv[1]}/metrics"
from server.config import FrontEndConfig
from server.observe.metrics import FrontEndMetrics

class Client:
    view = None
    stats_age = {}
    view_age = None

metrics = FrontEndMetrics(FrontEndConfig(), 0)
metrics.count("http_requests", "/v1/models", 200)
print(metrics.render(Client()).decode())
"""
