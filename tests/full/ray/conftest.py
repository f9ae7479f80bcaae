"""Clusters of several nodes on this machine; the fixture `sharp` has three nodes with a loopback address each."""

import json
import os
import socket
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray._private import services
from ray.cluster_utils import Cluster
from ray.serve._private.constants import SERVE_NAMESPACE
from ray.serve.config import HTTPOptions, gRPCOptions

from sharp.ray.application import Arguments
from sharp.ray.replica import ModelServer
from tests.full.deploy.dockerfile import environment, lineage, read_stages
from tests.full.ray.patience import patient_get_node
from tests.full.ray.slow_server import FOLDER, HELD, SlowServer
from tests.serving.conftest import write_folder

ROOT = Path(__file__).parents[3]
IMAGE = environment(lineage(read_stages((ROOT / "deploy" / "docker" / "Dockerfile").read_text()), "ray"))
NODE = {"include_dashboard": False, "object_store_memory": 80 * 2**20, "include_log_monitor": False}
# Without these settings Ray notices a lost node only after 15 seconds.
WATCH = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
REPLICAS = 3
MODELS = ("counting", "hashing")
DRAIN_SECONDS = 3


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def add_node(cluster, **options):
    """Start a node, without waiting until the other nodes know it."""
    return cluster.add_node(wait=False, **NODE, **options)


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


@dataclass(frozen=True)
class Replica:
    name: str
    pid: int
    actor: str
    node: str
    address: str
    metrics: str
    gpu: str = ""

    def total(self, name, model="counting"):
        """Return the sum of a metric as Prometheus would read it now."""
        with urllib.request.urlopen(self.metrics, timeout=10) as response:
            families = text_string_to_metric_families(response.read().decode())
            samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if sample.labels["model"] == model)

    def running(self):
        return self.total("sharp_requests_running")

    def ongoing(self):
        """Return the count that Serve compares with `max_ongoing_requests`."""
        return ray.get(ray.get_actor(self.actor, SERVE_NAMESPACE).get_num_ongoing_requests.remote())


class Sharp:
    """A cluster, and a deployment of `sharp` in it.

    `add_head`, `add_node` and `start` begin the cluster and the deployment.
    """

    def __init__(self, folder, **settings):
        self.cluster = Cluster()
        self._folder = folder / "replicas"
        self._folder.mkdir()
        self._models = [write_folder(folder / name, hashing=hashing) for hashing, name in enumerate(MODELS)]
        self._settings = settings
        self.grpc_port, self.http_port = free_port(), free_port()
        self.address = f"127.0.0.1:{self.grpc_port}"

    def add_head(self, address, watch=WATCH, **options):
        """Start the first node."""
        return add_node(self.cluster, node_ip_address=address, _system_config=watch, no_monitor=True, **options)

    def start(self, proxies="HeadOnly", **options):
        """Start Serve, and deploy."""
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level="warning")
        functions = ["sharp.ray.proxy:add_services"]
        serve.start(
            proxy_location=proxies,
            http_options=HTTPOptions(host="127.0.0.1", port=self.http_port),
            grpc_options=gRPCOptions(port=self.grpc_port, grpc_servicer_functions=functions),
        )
        self.deploy(**options)

    def deploy(self, version="1", server=SlowServer, metrics_port=0, **options):
        """Deploy with other options; a new `version` replaces the replicas, as new arguments do in `serve deploy`."""
        arguments = Arguments(
            models=[str(folder) for folder in self._models],
            metrics_port=metrics_port,
            settings={"kernels": False, "attention_interval": 0, "grace_seconds": 1} | self._settings,
        )
        known = {
            "num_replicas": REPLICAS,
            "autoscaling_config": None,
            "ray_actor_options": {"num_cpus": 1},
            "graceful_shutdown_timeout_s": DRAIN_SECONDS,
            "graceful_shutdown_wait_loop_s": 0.1,
            "health_check_period_s": 1,
        }
        deployment = ModelServer.options(func_or_class=server, version=version, _internal=True, **known | options)
        serve.run(deployment.bind(**arguments.model_dump()), name="sharp")

    @contextmanager
    def held(self):
        """Hold all streams: requests are accepted, but no stream begins or goes on in the block."""
        flag = self._folder.parent / HELD
        flag.touch()
        try:
            yield
        finally:
            flag.unlink()

    def statuses(self):
        (deployment,) = serve.status().applications["sharp"].deployments.values()
        return {str(state): count for state, count in deployment.replica_states.items() if count}

    def running(self):
        return sum(replica.running() for replica in self.replicas())

    def ongoing(self):
        return sum(replica.ongoing() for replica in self.replicas())

    def replicas(self):
        """Return the replicas whose process is alive."""
        found = []
        for path in self._folder.iterdir():
            replica = Replica(path.name, **json.loads(path.read_text()))
            if os.path.exists(f"/proc/{replica.pid}"):
                found.append(replica)
        return found


@contextmanager
def empty_cluster(folder, **settings):
    """Yield a cluster without a node, in the environment of the image."""
    patch = pytest.MonkeyPatch()
    for name, value in {
        "RAY_AUTH_MODE": "disabled",  # whatever a file in the home folder says
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        FOLDER: str(folder / "replicas"),
        **{name: value for name, value in IMAGE.items() if name.startswith("RAY_")},
    }.items():
        patch.setenv(name, value)
    patch.setattr(services, "get_node", patient_get_node)
    found = Sharp(folder, **settings)
    try:
        yield found
        serve.shutdown()
    finally:
        ray.shutdown()
        found.cluster.shutdown()
        patch.undo()


@pytest.fixture(scope="module")
def sharp(tmp_path_factory):
    with empty_cluster(tmp_path_factory.mktemp("cluster")) as found:
        found.add_head("127.0.0.2", num_cpus=0)
        large = add_node(found.cluster, num_cpus=REPLICAS, node_ip_address="127.0.0.3")
        small = add_node(found.cluster, num_cpus=1, node_ip_address="127.0.0.4")
        found.nodes = [large, small]
        found.start()
        yield found
