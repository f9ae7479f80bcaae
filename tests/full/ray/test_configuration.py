"""The configurations in `deploy/ray` are accepted by Serve and by Sharp's application."""

from importlib.metadata import version

import pytest
import yaml
from pydantic import ValidationError
from ray._private.ray_constants import DEFAULT_DASHBOARD_AGENT_LISTEN_PORT
from ray.dashboard.http_server_agent import PUBLIC_EXACT_PATHS
from ray.serve.schema import ServeDeploySchema

from sharp.ray.application import Arguments, build
from sharp.ray.backpressure import missing_settings
from sharp.ray.proxy import SERVICES
from sharp.ray.replica import ModelServer
from sharp.serving.api.errors import InputError
from sharp.serving.server.settings_sources import ServeSettings
from tests.full.deploy.rendering import KUBERNETES, ROOT
from tests.full.ray.conftest import IMAGE

(SERVICE,) = yaml.safe_load_all((KUBERNETES / "overlays" / "ray" / "ray-service.yaml").read_text())
CONFIGURATIONS = {
    "serve.yaml": (ROOT / "deploy" / "ray" / "serve.yaml").read_text(),
    "gpus.yaml": (ROOT / "deploy" / "ray" / "gpus.yaml").read_text(),
    "RayService": SERVICE["spec"]["serveConfigV2"],
}
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
(WORKERS,) = CLUSTER["workerGroupSpecs"]
TLS = {"tls_cert": "tls.crt", "tls_key": "tls.key"}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_serve_and_the_application_take_it(name):
    schema = ServeDeploySchema.model_validate(yaml.safe_load(CONFIGURATIONS[name]))
    (application,) = schema.applications
    assert application.import_path == "sharp.ray.application:build"
    build(Arguments(**application.args))
    (deployment,) = application.deployments
    assert deployment.name == ModelServer.name
    assert schema.grpc_options.port == ServeSettings.model_fields["grpc_port"].default
    (function,) = schema.grpc_options.grpc_servicer_functions
    assert schema.grpc_options.grpc_servicer_functions == [function] == ["sharp.ray.proxy:add_services"]
    ports = {port["containerPort"] for port in WORKERS["template"]["spec"]["containers"][0]["ports"]}
    if name == "RayService":
        assert ports == {schema.grpc_options.port, schema.http_options.port, application.args["metrics_port"]}


def test_a_replica_has_every_method():
    """A replica has every method of the services.

    Serve looks a method up by its name, and reports a lost replica where the method is missing.
    """
    methods = {method.name for service in SERVICES for method in service.methods}
    assert methods - {*dir(ModelServer.func_or_class)} == set()


def test_the_replicas_fit_the_pods():
    (application,) = yaml.safe_load(CONFIGURATIONS["RayService"])["applications"]
    (deployment,) = application["deployments"]
    container = WORKERS["template"]["spec"]["containers"][0]
    assert str(deployment["ray_actor_options"]["num_cpus"]) == container["resources"]["limits"]["cpu"]
    assert deployment["max_replicas_per_node"] == 1  # two replicas would need the port of the metrics
    assert deployment["autoscaling_config"]["max_replicas"] <= WORKERS["maxReplicas"]
    models = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(application["args"]["models"]) <= models
    # A replica's drain ends before the node's drain, which ends before the kubelet kills the pod.
    node = int(IMAGE["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
    assert deployment["graceful_shutdown_timeout_s"] < node
    assert node < WORKERS["template"]["spec"]["terminationGracePeriodSeconds"]


def test_ray_responds_to_the_probes():
    serve = ServeDeploySchema.model_validate(yaml.safe_load(CONFIGURATIONS["RayService"]))
    for group in (CLUSTER["headGroupSpec"], WORKERS):
        (container,) = group["template"]["spec"]["containers"]
        for kind in ("livenessProbe", "readinessProbe"):
            if asked := container[kind].get("httpGet"):
                assert asked["port"] == DEFAULT_DASHBOARD_AGENT_LISTEN_PORT
                assert asked["path"] in PUBLIC_EXACT_PATHS  # the kubelet has no token
            else:
                assert container[kind]["grpc"]["port"] == serve.grpc_options.port


def test_a_replica_may_leave_a_drained_node():
    (application,) = yaml.safe_load(CONFIGURATIONS["RayService"])["applications"]
    (deployment,) = application["deployments"]
    budget = yaml.safe_load((KUBERNETES / "overlays" / "ray" / "pod-disruption-budget.yaml").read_text())
    assert 0 < budget["spec"]["minAvailable"] < deployment["autoscaling_config"]["min_replicas"]


def test_the_page_says_what_the_image_sets():
    page = (ROOT / "docs" / "deploy.md").read_text()
    settings = [f"{name}={value}" for name, value in IMAGE.items() if name.startswith("RAY_")]
    assert len(settings) == 7
    assert all(setting in page for setting in settings)


def test_the_image_bounds_what_nobody_reads():
    assert missing_settings(IMAGE) == ""
    assert missing_settings({**IMAGE, "RAY_SERVE_USE_GRPC_BY_DEFAULT": "0"}) == "RAY_SERVE_USE_GRPC_BY_DEFAULT=1"


def test_the_version_is_the_tested_one():
    assert version("ray") == CLUSTER["rayVersion"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"models": []}, ValidationError, "models"),
        ({"models": ["a"], "model": "b"}, ValidationError, "Extra inputs"),
        ({"models": ["a"], "models_per_replica": 0}, ValidationError, "models_per_replica"),
        ({"models": ["a"], "settings": {"grpc_prot": 1}}, InputError, "grpc_prot: there is no such setting"),
        ({"models": ["a"], "settings": {"max_sequences": 0}}, InputError, "max_sequences is 0"),
        ({"models": ["a"], "settings": {"grpc_port": 50052}}, InputError, "grpc_port: ports are Serve's: grpc_options"),
        ({"models": ["a"], "settings": {"http_port": 8001}}, InputError, "http_port: ports are Serve's"),
        ({"models": ["a"], "settings": TLS}, InputError, "TLS is not Serve's"),
        ({"models": ["a"], "settings": TLS | {"tls_client_ca": "ca.crt"}}, InputError, "TLS is not Serve's"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        build(Arguments(**arguments))


def test_tls_of_the_environment_is_refused(monkeypatch):
    for name, value in TLS.items():
        monkeypatch.setenv(f"SHARP_{name.upper()}", value)
    with pytest.raises(InputError, match="TLS is not Serve's"):
        build(Arguments(models=["a"]))
