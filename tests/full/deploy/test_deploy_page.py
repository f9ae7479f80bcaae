"""Every command of docs/deploy.md runs or, if it needs a cluster or Docker, names only things that exist.

The export takes a while, so it runs once, in tests/full/end_to_end/test_image.py, which then plans with the model and
serves it.
"""

import hashlib
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import trustme
import yaml
from ray.scripts.scripts import cli as ray_command
from ray.serve.scripts import cli as serve_command

from sharp.core.cli import load_command
from sharp.serving.client.options import TOKEN_VARIABLE
from tests.full.deploy.dockerfile import read_stages
from tests.full.deploy.policies import POLICIES
from tests.full.deploy.policies.documents import PICKER, of_kind, pods
from tests.full.deploy.policies.pods import VERSION
from tests.full.deploy.rendering import ROOT, documents, kubectl, render, write_kustomization
from tests.full.deploy.test_images import MODELS

PAGE = (ROOT / "docs" / "deploy.md").read_text()
SCRIPTS = Path(sys.executable).parent
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]
PLAIN = [text for kind, text in re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.M | re.S) if not kind]
DIGEST = f"sha256:{'0' * 64}"
INLINE = [command for command in re.findall(r"`(kubectl [^`]+)`", PAGE) if " " in command]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """Return a folder with everything that the page begins with: the repository, its kustomization, and the secrets."""
    folder = tmp_path_factory.mktemp("page")
    for name in ("deploy", "models"):
        (folder / name).symlink_to(ROOT / name)
    model = folder / "build" / "deploy" / "text-ssa-ssa"
    model.mkdir(parents=True)
    for name in ("sharp.json", "model.onnx", "model.onnx.data"):
        (model / name).write_text(name)
    (written,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S)
    (folder / "my-cluster").mkdir()
    (folder / "my-cluster" / "kustomization.yaml").write_text(written)
    (folder / "tokens.txt").write_text("first-token\n")
    authority = trustme.CA()
    issued = authority.issue_cert("sharp", "localhost")
    authority.cert_pem.write_to_path(folder / "ca.crt")
    issued.private_key_pem.write_to_path(folder / "tls.key")
    issued.cert_chain_pems[0].write_to_path(folder / "tls.crt")
    return folder


@pytest.fixture(scope="module")
def cluster(workplace):
    """Return the documents that `kubectl apply -k my-cluster` would send."""
    return render(workplace / "my-cluster")


def run(command, workplace):
    words = shlex.split(command)
    words[0] = shutil.which(words[0], path=str(SCRIPTS)) or shutil.which(words[0])
    result = subprocess.run(words, cwd=workplace, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def option(words, name):
    return words[words.index(name) + 1]


def check_docker_build(words, cluster):
    file = ROOT / option(words, "-f")
    text = file.read_text()
    assert "--target" not in words or option(words, "--target") in {stage.name for stage in read_stages(text)}
    name, _, value = option(words, "--build-arg").partition("=")
    assert re.search(rf"^ARG {name}$", text, re.M)
    assert value == f"${name}"
    assert any(command.startswith(f"{name}=$(") for command in COMMANDS)
    if "-t" in words:
        assert option(words, "-t") in images(cluster)


def images(cluster):
    """Return the images that the page builds: those of its overlay, of init containers for models, and Ray's."""
    used = {container["image"] for pod in pods(cluster) for container in pod.containers}
    models = {f"registry.example.com/{name}:{VERSION}" for name in MODELS}
    return used | models | {f"registry.example.com/sharp:{VERSION}-ray"}


def check_helm(words):
    assert words[0] == "install"
    chart = ROOT / words[2]
    values = yaml.safe_load((chart / "values.yaml").read_text())
    for path, value in (word.split("=") for name, word in itertools.pairwise(words) if name == "--set"):
        *parents, last = path.split(".")
        part = values
        for parent in parents:
            part = part[parent]
        assert last in part, path
        part[last] = DIGEST if value == "$MODEL_DIGEST" else yaml.safe_load(value)
    jsonschema.validate(values, json.loads((chart / "values.schema.json").read_text()))


def check_rollout(words, cluster):
    assert words[1] in ("status", "undo", "history")
    check_named(words[2], cluster)


def check_named(resource, cluster):
    kind, _, name = resource.partition("/")
    assert name in {document["metadata"]["name"] for document in of_kind(cluster, kind.capitalize())}


def check_in_cluster(words, cluster, workplace):
    """Check a command of kubectl that asks a cluster."""
    if words[:1] == ["-n"]:
        assert {document["metadata"].get("namespace", words[1]) for document in cluster} == {words[1]}
        words = words[2:]
    verb = words[0]
    if verb in ("apply", "diff"):
        assert words[1] == "-k"
        assert render(workplace / words[2])
    elif verb == "rollout":
        check_rollout(words, cluster)
    elif verb == "port-forward":
        check_named(words[1], cluster)
        name = words[1].partition("/")[2]
        (service,) = (document for document in of_kind(cluster, "Service") if document["metadata"]["name"] == name)
        assert int(words[2].partition(":")[2]) in {port["port"] for port in service["spec"]["ports"]}
    elif verb == "logs":
        check_named(words[1], cluster)
        assert option(words, "-c") in {container["name"] for pod in pods(cluster) for container in pod.containers}
    else:
        assert words in (["describe", "pods"], ["label", "namespace", "NAME", "sharp-client=true"])


@pytest.mark.parametrize("command", [*COMMANDS, *INLINE])
def test_a_command(command, workplace, cluster):
    words = shlex.split(command)
    kind = words[0] if words[0] != "kubectl" else " ".join(words[:2])
    if kind in ("tar", "sha256sum", "kubectl kustomize", "openssl", "cp"):
        assert run(command, workplace) or kind in ("tar", "openssl", "cp")
    elif kind == "sharp-export" or words[:2] == ["sharp", "plan"]:
        assert f'"{command}"' in (ROOT / "tests" / "full" / "end_to_end" / "test_image.py").read_text()
    elif digest := re.fullmatch(r"(\w+)_DIGEST=\$\(docker buildx imagetools inspect (\S+) --format '.*'\)", command):
        text = "".join(path.read_text() for path in (ROOT / "deploy" / "docker").glob("*Dockerfile"))
        base = re.search(rf"^(ARG {digest[1]}_IMAGE=|FROM ){re.escape(digest[2])}(@|$)", text, re.M)
        assert base or f"docker push {digest[2]}" in COMMANDS
    elif kind == "docker" and words[1] == "build":
        check_docker_build(words[2:], cluster)
    elif kind == "docker":
        assert words[1] == "push"
        assert words[2] in images(cluster)
        assert any(f"-t {words[2]}" in other for other in COMMANDS)
    elif kind == "sharp":
        load_command(words[1]).make_context(words[1], words[2:])  # every option exists and every value is valid
    elif kind == "helm":
        check_helm(words[1:])
    elif command == f"export {TOKEN_VARIABLE}=$(head -n 1 tokens.txt)":
        assert "openssl rand -hex -out tokens.txt 32" in COMMANDS
    elif kind == "export":  # tests/full/ray checks that the values are those of the image
        assert all(re.fullmatch(r"RAY_\w+=\w+", word) for word in words[1:])
    elif kind == "ray":
        ray_command.commands[words[1]].make_context(words[1], words[2:])
    elif kind == "serve":  # tests/full/ray/test_configuration.py checks the content of the file
        serve_command.commands[words[1]].make_context(words[1], [str(workplace / words[2]), *words[3:]])
        assert (workplace / words[2]).is_file()
    elif "create" in words:
        made = yaml.safe_load(run(f"{command} --dry-run=client -o yaml", workplace))
        assert made["kind"] == "Namespace" or made["metadata"]["namespace"] == "sharp"
    else:
        assert words[0] == "kubectl", f"nothing here knows how to run or check: {command}"
        check_in_cluster(words[1:], cluster, workplace)


def test_the_overlay_keeps_to_the_policies(cluster):
    assert {name: policy(cluster) for name, policy in POLICIES.items() if policy(cluster)} == {}


def test_the_archive_is_what_the_init_container_takes(workplace, tmp_path):
    (pack,) = (command for command in COMMANDS if command.startswith("tar "))
    run(pack, workplace)
    archive = workplace / "build" / "deploy" / "text-ssa-ssa.tar.gz"
    known = {"MODEL_URL": archive.as_uri(), "MODEL_SHA256": hashlib.sha256(archive.read_bytes()).hexdigest()}
    script = ROOT / "deploy" / "kubernetes" / "components" / "model-from-url" / "fetch_model.py"
    subprocess.run([sys.executable, "-I", script, tmp_path], env=known, check=True, timeout=60)
    exported = workplace / "build" / "deploy" / "text-ssa-ssa"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        path.name: path.read_bytes() for path in exported.iterdir()
    }


def test_the_secrets_have_what_the_servers_read(workplace, cluster):
    commands = [command for command in COMMANDS if "create secret generic" in command]
    made = [yaml.safe_load(run(f"{command} --dry-run=client -o yaml", workplace)) for command in commands]
    keys = {secret["metadata"]["name"]: set(secret["data"]) for secret in made}
    (pod,) = pods(cluster)
    mounted = {volume["secret"]["secretName"] for volume in pod.spec["volumes"] if "secret" in volume}
    assert set(keys) == mounted
    (settings,) = (document["data"] for document in of_kind(cluster, "ConfigMap") if "SHARP_HOST" in document["data"])
    files = {Path(settings[name]).name for name in ("SHARP_TLS_CERT", "SHARP_TLS_KEY", "SHARP_TOKEN_FILE")}
    (monitor,) = of_kind(cluster, "PodMonitor")
    files.add(monitor["spec"]["podMetricsEndpoints"][0]["tlsConfig"]["ca"]["secret"]["key"])
    assert files == set.union(*keys.values())


def plain(text):
    """Return the documents of the plain block that has `text`, with a digest in place of dots."""
    (block,) = (block for block in PLAIN if text in block)
    return documents(block.replace("sha256:...", DIGEST))


def test_the_overlay_takes_the_additions_of_the_page(tmp_path):
    """The page's digest of the model's image, and its secret for a registry, reach the manifests."""
    images, patches = plain("name: sharp-model\n    newName")[0]["images"], plain("imagePullSecrets")[0]["patches"]
    for component in ("model-from-image", "model-from-image-volume"):
        parts = ["cpu", component]
        found = render(write_kustomization(tmp_path / component, parts, images=images, patches=patches))
        assert f"registry.example.com/sharp-model@{DIGEST}" in json.dumps(found)
        (account,) = of_kind(found, "ServiceAccount")
        (secret,) = account["imagePullSecrets"]
        assert any(f"create secret docker-registry {secret['name']} " in command for command in COMMANDS)


def test_a_claim_is_filled_as_the_namespace_allows(overlays):
    """The page's claim and Job are valid, and the Job's pod keeps to the pod security standard of the namespace."""
    claim, job = plain("kind: PersistentVolumeClaim")
    for document in (claim, job):
        kubernetes_validate.validate(document, "1.30", strict=True)
    (pod,) = pods(overlays["cpu"])
    (served,) = (volume["persistentVolumeClaim"] for volume in pod.spec["volumes"] if volume["name"] == "model")
    (volume,) = job["spec"]["template"]["spec"]["volumes"]
    assert claim["metadata"]["name"] == volume["persistentVolumeClaim"]["claimName"] == served["claimName"]
    template = {"metadata": {"labels": {}}} | job["spec"]["template"]
    as_pods = [{"kind": "Deployment", "metadata": job["metadata"], "spec": {"template": template}}]
    for name in ("restricted_pods", "no_cluster_access", "resources_are_set"):
        assert POLICIES[name](as_pods) == []


def test_the_gateway_of_the_page_is_that_of_the_route(overlays):
    (gateway,), (rule,) = plain("kind: Gateway"), plain("kind: DestinationRule")
    found = overlays["inference-pool"]
    (route,) = of_kind(found, "HTTPRoute")
    (parent,) = route["spec"]["parentRefs"]
    assert (gateway["kind"], gateway["metadata"]["name"]) == (parent["kind"], parent["name"])
    assert gateway["metadata"]["namespace"] == route["metadata"]["namespace"]
    assert rule["spec"]["host"] == f"{PICKER}.{route['metadata']['namespace']}.svc.cluster.local"
    admitted = [policy["spec"]["ingress"] for policy in of_kind(found, "NetworkPolicy")]
    (label,) = gateway["spec"]["infrastructure"]["labels"].items()
    expression = {"key": label[0], "operator": "In", "values": [label[1]]}
    assert all(f'"matchExpressions": [{json.dumps(expression)}]' in json.dumps(rules) for rules in admitted)


def test_the_table_lists_the_values_of_the_chart():
    rows = re.findall(r"^\| (.*?) \|", PAGE.partition("| value of a chart |")[2].partition("\n\n")[0], re.M)
    listed = {name.partition(".")[0] for row in rows for name in re.findall(r"`([\w.*]+)`", row)}
    values = yaml.safe_load((ROOT / "deploy" / "helm" / "sharp" / "values.yaml").read_text())
    assert listed == values.keys()


def test_the_table_lists_the_components():
    rows = re.findall(r"^\| (`[a-z].*?) \|", PAGE.partition("| component |")[2].partition("\n\n")[0], re.M)
    listed = {name for row in rows for name in re.findall(r"`([\w-]+)`", row)}
    assert listed == {path.name for path in (ROOT / "deploy" / "kubernetes" / "components").iterdir()}


def test_the_numbers_are_those_of_the_manifests(cluster):
    (pod,) = pods(cluster)
    assert f"killed after {pod.spec['terminationGracePeriodSeconds']} s" in PAGE
    (settings,) = (document["data"] for document in of_kind(cluster, "ConfigMap") if "SHARP_HOST" in document["data"])
    assert f"`SHARP_GRACE_SECONDS` ({settings['SHARP_GRACE_SECONDS']})" in PAGE
    assert f"no new requests {pod.server['lifecycle']['preStop']['exec']['command'][1]} s after" in PAGE


def test_the_base_says_what_the_page_says(tmp_path):
    """The base lacks the mount that the page's error message names.

    The API server writes that message, so this test only checks that the mount is there.
    """
    (pod,) = pods(render(ROOT / "deploy" / "kubernetes" / "base"))
    assert pod.server["volumeMounts"][1]["name"] == "model"
    assert '`volumeMounts[1].name: Not found: "model"`' in PAGE


def test_kubectl_is_recent_enough():
    version = yaml.safe_load(kubectl("version", "--client", "-o", "yaml").stdout)["clientVersion"]
    assert (int(version["major"]), int(re.match(r"\d+", version["minor"])[0])) >= (1, 27)
