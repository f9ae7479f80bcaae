"""Read Dockerfiles into stages, and find problems by those of hadolint's rules that matter to us, and our own."""

import json
import re
import shlex
from dataclasses import dataclass, field
from io import BytesIO

from dockerfile_parse import DockerfileParser

from sharp.serving.server.settings_sources import KNOWN_VARIABLES, PREFIX, ServeSettings

EXEC_FORM = ("CMD", "ENTRYPOINT")
SECRET = re.compile(r"(?i)(password|secret|token|api_?key)")


@dataclass
class Stage:
    """One FROM and the instructions after it: `(instruction, value)` in order."""

    image: str
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def values(self, instruction: str) -> list[str]:
        return [value for name, value in self.instructions if name == instruction]


def read_stages(text: str) -> list[Stage]:
    stages: list[Stage] = []
    parser = DockerfileParser(fileobj=BytesIO(text.encode()))
    for part in parser.structure:
        name, value = part["instruction"], part["value"]
        if name == "FROM":
            words = value.split()
            stages.append(Stage(words[0], words[2] if len(words) > 2 else ""))
        elif name != "COMMENT" and stages:
            stages[-1].instructions.append((name, value))
    return stages


def lineage(stages: list[Stage], name: str) -> list[Stage]:
    """Return the stage and all stages that it is built from, the base first."""
    (stage,) = (stage for stage in stages if stage.name == name)
    named = {stage.name for stage in stages}
    return [*(lineage(stages, stage.image) if stage.image in named else []), stage]


def environment(stages: list[Stage]) -> dict[str, str]:
    pairs = [word.partition("=") for stage in stages for value in stage.values("ENV") for word in shlex.split(value)]
    return {name: value for name, _, value in pairs}


def problems(text: str, shipped: tuple[str, ...]) -> list[str]:
    """Return the problems of a Dockerfile; `shipped` names the stages that become images of servers."""
    stages = read_stages(text)
    found = []
    named = {stage.name for stage in stages}
    for stage in stages:
        if stage.image not in named and stage.image != "scratch" and not re.search(r"@\$\{\w+_DIGEST\}$", stage.image):
            found.append(f"{stage.image} is not pinned by a digest that is given")
        for name, value in stage.instructions:
            if name == "ADD":
                found.append("ADD fetches and unpacks; COPY says what it does")
            if name in EXEC_FORM and not _is_list(value):
                found.append(f"{name} {value} runs in a shell, which does not hand SIGTERM on")
            if name == "HEALTHCHECK" and value != "NONE" and not _is_list(value.partition("CMD ")[2]):
                found.append(f"HEALTHCHECK {value} runs in a shell")
            if name in ("ENV", "ARG") and SECRET.search(value):
                found.append(f"{name} {value} would stay in the image")
            if name == "WORKDIR" and not value.startswith("/"):
                found.append(f"WORKDIR {value} is relative")
            if name == "RUN":
                found += _run_problems(value)
            if name == "COPY" and value.split()[-2:-1] == ["."] and "--from" not in value and stage.name:
                found.append("COPY . takes whatever lies there")
    for name in shipped:
        found += _shipped_problems(lineage(stages, name))
    return found


def _is_list(value: str) -> bool:
    try:
        return isinstance(json.loads(value), list)
    except ValueError:
        return False


def _run_problems(command: str) -> list[str]:
    found = []
    if "apt-get install" in command:
        if "--no-install-recommends" not in command:
            found.append("apt-get installs what is only recommended")
        if "rm -rf /var/lib/apt/lists" not in command:
            found.append("apt's package lists stay in the layer")
        if "apt-get update" not in command:
            found.append("apt-get install without update in the same layer")
    if re.search(r"apt-get (dist-)?upgrade", command):
        found.append("apt-get upgrade makes every build another image")
    for part in re.split(r"&&|;", command):
        if re.search(r"pip\S* .*\b(install|wheel)\b", part) and "--no-cache-dir" not in part:
            found.append("pip's cache stays in the layer")
        sure = ("--require-hashes", "--no-deps", "--constraint constraints.txt")
        if re.search(r"pip\S* .*\binstall\b", part) and not any(option in part for option in sure):
            found.append("pip installs versions that nobody tested")
    if re.search(r"(?<!\|)\|(?!\|)", command) and "pipefail" not in command:
        found.append("a failure before a pipe is not seen")
    if re.search(r"\b(sudo|curl|wget)\b", command):
        found.append("a build step downloads past the package managers")
    return found


def _shipped_problems(stages: list[Stage]) -> list[str]:
    found = []
    image = stages[-1].name
    values = {name: [value for stage in stages for value in stage.values(name)] for name in ("USER", "RUN", "EXPOSE")}
    users = values["USER"][-1:] or ["root"]
    if not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", users[0]):
        found.append(f"{image} runs as {users[0]}: Kubernetes can check a number other than 0 only")
    if values["RUN"]:
        found.append(f"{image} is made by commands, which leave tools and caches behind; copy from another stage")
    for instruction in ("HEALTHCHECK", "ENTRYPOINT"):
        if not any(stage.values(instruction) for stage in stages):
            found.append(f"{image} has no {instruction}")
    defaults = {str(ServeSettings.model_fields[name].default) for name in ("grpc_port", "http_port")}
    if {port for value in values["EXPOSE"] for port in value.split()} != defaults:
        found.append(f"{image} exposes other ports than the server's")
    known = environment(stages)
    found += [
        f"{name} is no setting of sharp-serve"
        for name in known
        if name.startswith(PREFIX) and name not in KNOWN_VARIABLES
    ]
    if known.get("ORT_DISABLE_TELEMETRY") != "1":
        found.append(f"{image} lets ONNX Runtime report its use")
    return found
