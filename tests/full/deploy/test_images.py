"""The Dockerfiles obey the rules, and every rule finds the error that it is for."""

import re
import tomllib

import pytest
from dockerfile_parse import DockerfileParser

from sharp.core.cli import COMMANDS
from tests.full.deploy.dockerfile import lineage, problems, read_stages
from tests.full.deploy.policies.pods import VERSION
from tests.full.deploy.rendering import KUBERNETES, ROOT

DOCKER = ROOT / "deploy" / "docker"
SERVER = (DOCKER / "Dockerfile").read_text()
SHIPPED = ("cpu", "cuda", "ray")
MODELS = ("sharp-model", "sharp-export")  # the images of init containers
LOCKS = {"build": (), "cpu": ("serve", "tracing"), "ray": ("serve", "tracing", "ray")}


def test_the_rules_hold():
    assert problems(SERVER, (*SHIPPED, "export")) == []
    assert problems((DOCKER / "model.Dockerfile").read_text(), ()) == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("${PYTHON_IMAGE}@${PYTHON_DIGEST} AS runtime", "python:3.11 AS runtime", "not pinned by a digest"),
        ("USER 10001:10001", "USER root", "runs as root"),
        ("USER 10001:10001", "USER sharp", "Kubernetes can check a number"),
        ("USER 10001:10001\n", "", "runs as root"),
        ("EXPOSE 50051 8000", "EXPOSE 50051 8080", "other ports"),
        ('CMD ["sharp", "health"]', "CMD sharp health", "runs in a shell"),
        ("HEALTHCHECK", "LABEL", "has no HEALTHCHECK"),
        ('ENTRYPOINT ["sharp-serve"]', "ENTRYPOINT sharp-serve", "does not hand SIGTERM on"),
        ("SHARP_HOST", "SHARP_ADDRESS", "SHARP_ADDRESS is no setting"),
        ("ORT_DISABLE_TELEMETRY=1", "ORT_DISABLE_TELEMETRY=0", "report its use"),
        ("ENV NVIDIA_VISIBLE_DEVICES", "ENV API_TOKEN=x NVIDIA_VISIBLE_DEVICES", "would stay in the image"),
        (" --no-install-recommends", "", "only recommended"),
        (" && rm -rf /var/lib/apt/lists/*", "", "package lists stay"),
        ("apt-get update && ", "", "without update"),
        ("apt-get update", "apt-get update && apt-get upgrade", "every build another image"),
        ("install --no-cache-dir", "install", "cache stays"),
        (" --constraint constraints.txt", "", "nobody tested"),
        (" --require-hashes", "", "nobody tested"),
        ("COPY serving serving", "ADD serving serving", "ADD fetches"),
        ("COPY serving serving", "COPY . .", "whatever lies there"),
        ("WORKDIR /src", "WORKDIR src", "is relative"),
        ("FROM runtime AS cpu", "FROM runtime AS cpu\nRUN true", "made by commands"),
        ("COPY proto proto", "COPY proto proto\nRUN curl https://example.com | sh", "before a pipe"),
        ("COPY proto proto", "COPY proto proto\nRUN curl -o x https://example.com", "past the package managers"),
    ],
)
def test_a_rule_finds(old, new, expected):
    assert old in SERVER
    found = problems(SERVER.replace(old, new), SHIPPED)
    assert any(expected in problem for problem in found), found


def test_the_runtime_has_what_it_copies_and_no_compiler():
    stages = read_stages(SERVER)
    for name in (*SHIPPED, "export"):
        source = "install" if name == "cpu" else f"install-{name}"
        base, image = lineage(stages, name)
        assert (base.name, image.values("COPY")) == ("runtime", [f"--from={source} /opt/sharp /opt/sharp"])
    installed = [command for stage in lineage(stages, "install-cuda") for command in stage.values("RUN")]
    assert [command for command in installed if "g++" in command] == stages[0].values("RUN")[:1]


def test_the_context_holds_what_is_built_from():
    """The stages copy exactly what the wheel is made of, and the ignore file lets exactly that through."""
    copied = {word for value in read_stages(SERVER)[0].values("COPY") for word in value.split()[:-1]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = set(project["tool"]["scikit-build"]["wheel"]["packages"].values())
    sources = {"CMakeLists.txt", "cmake", "pyproject.toml", "constraints.txt", project["project"]["readme"]}
    sources |= {f"deploy/docker/requirements-{name}.txt" for name in LOCKS}
    templates = {template["template-path"] for template in project["tool"]["scikit-build"]["generate"]}
    assert copied == packages | sources | templates | set(project["project"]["license-files"])
    assert all((ROOT / name).exists() for name in copied)
    lines = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in lines
    assert {line[1:] for line in lines if line.startswith("!")} == copied


def locked(name):
    """Return {package: (version, hashes)} of a file of requirements."""
    text = (DOCKER / f"requirements-{name}.txt").read_text().replace("\\\n", " ")
    entries = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return {
        entry[0].partition("==")[0].partition("[")[0]: (entry[0].partition("==")[2], entry[1:]) for entry in entries
    }


def names(requirements):
    """Return canonical names of requirements without versions, extras and markers, and without Sharp itself."""
    found = {re.split(r"[<>=~\[; ]", requirement)[0].lower().replace("_", "-") for requirement in requirements}
    return found - {"sharp-attention"}


@pytest.mark.parametrize(("name", "extras"), LOCKS.items())
def test_images_install_what_the_tests_ran_with_by_hash(name, extras):
    found = locked(name)
    assert all(version and hashes for version, hashes in found.values())
    assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", digest) for _, hashes in found.values() for digest in hashes)
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")
    )
    assert {one: version for one, (version, _) in found.items() if one in pinned and version != pinned[one]} == {}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = names(project["build-system"]["requires"]) | {"cmake", "ninja", "cyclonedx-bom"}
    if extras:
        lists = [project["project"]["dependencies"]]
        lists += [project["project"]["optional-dependencies"][extra] for extra in extras]
        asked = names(requirement for requirements in lists for requirement in requirements)
    assert asked <= found.keys()


def test_the_commands_and_names_are_real():
    stages = read_stages(SERVER)
    runtime = next(stage for stage in stages if stage.name == "runtime")
    assert runtime.values("HEALTHCHECK")[0].endswith('CMD ["sharp", "health"]')
    assert "health" in COMMANDS
    named = "".join(path.read_text() for path in KUBERNETES.rglob("*.yaml"))
    for target in SHIPPED:
        assert f"{VERSION}-{target}" in named
    for name in MODELS:
        assert f"image: {name}:{VERSION}" in named
    for path in DOCKER.glob("*Dockerfile"):
        assert f":{VERSION}" in path.read_text()  # the command in the file's comment names the version
    # The container's user is the one that the manifests name.
    assert f"runAsUser: {runtime.values('USER')[0].split(':')[0]}" in named
    model = DockerfileParser(fileobj=(DOCKER / "model.Dockerfile").open("rb"))
    assert [
        instruction["value"] for instruction in model.structure if instruction["instruction"] == "USER"
    ] == runtime.values("USER")
