"""Third-party clients, and the programs that use them against a server."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.prometheus import UNPACKED

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
INSTALLED = Path(__file__).parents[3] / "build" / "clients"
NODE = INSTALLED / "node"
SECONDS = 600  # on a busy machine litellm takes half a minute to import, and an agent generates for minutes


@dataclass(frozen=True)
class Client:
    """A third-party package and the program that uses it.

    `environment` is the folder that has the package, or "" for a program of the system. `model` is the key in `MODELS`
    of the model that the server needs.
    """

    package: str
    program: str
    environment: str = "python"
    model: str = "decoder"

    @property
    def node(self) -> bool:
        """Whether the package comes from npm."""
        return self.program.endswith(".mjs")

    @property
    def installed(self) -> bool:
        """Whether the package is installed, which `make clients` does for all packages."""
        if self.binary:
            return self.binary_path is not None
        return (NODE / "node_modules" / self.package).is_dir() if self.node else self.python.is_file()

    @property
    def binary(self) -> bool:
        """Whether the package is a program of the system, which `make setup` has unpacked."""
        return not self.environment

    @property
    def binary_path(self) -> str | None:
        """The path of the program of the system."""
        return shutil.which(self.package) or shutil.which(self.package, path=str(UNPACKED))

    @property
    def python(self) -> Path:
        """The interpreter that runs the program."""
        return Path(sys.executable) if self.binary else INSTALLED / self.environment / "bin" / "python"

    @property
    def version(self) -> str:
        """The installed version of the package."""
        if self.binary:
            said = subprocess.run([str(self.binary_path), "--version"], capture_output=True, text=True, check=True)
            return said.stdout.partition("version ")[2].split()[0].rstrip(",")
        if self.node:
            return str(json.loads((NODE / "node_modules" / self.package / "package.json").read_text())["version"])
        code = f"import importlib.metadata as m; print(m.version({self.package!r}))"
        return subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    def run(self, base: str, model: str, grpc: str) -> subprocess.CompletedProcess[str]:
        """Use the server at `base` and `grpc` (HOST:PORT); the program prints what it called."""
        # programs of the system exist without `make clients`, but the folder may not
        INSTALLED.mkdir(parents=True, exist_ok=True)
        program, folder = PROGRAMS / self.program, INSTALLED
        if self.node:  # Node looks for packages beside the program
            program, folder = NODE / self.program, NODE
            program.write_text((PROGRAMS / self.program).read_text())
        command = ["node" if self.node else str(self.python), str(program), base, model, grpc]
        return subprocess.run(
            [*command, str(self.binary_path)] if self.binary else command,
            cwd=folder,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )


CLIENTS = (
    Client("openai", "openai_client.py"),
    Client("langchain-openai", "langchain_client.py"),
    Client("litellm", "litellm_client.py"),
    Client("instructor", "instructor_client.py"),
    Client("llama-index-llms-openai-like", "llama_index_client.py"),
    Client("pydantic-ai-slim", "pydantic_ai_client.py"),
    Client("anthropic", "anthropic_client.py"),
    Client("openai", "openai_embeddings.py", model="encoder"),
    Client("langchain-openai", "langchain_embeddings.py", model="encoder"),
    Client("litellm", "litellm_encoder.py", model="encoder"),
    Client("cohere", "cohere_client.py", model="encoder"),
    Client("tritonclient", "tritonclient_http.py"),
    Client("tritonclient", "tritonclient_grpc.py"),
    Client("tritonclient", "tritonclient_tensors.py", model="set"),
    Client("kserve", "kserve_client.py", "kserve"),
    Client("lm-eval", "lm_eval_client.py", "lm-eval"),
    Client("guidellm", "guidellm_client.py", "guidellm"),
    Client("aiperf", "aiperf_client.py", "aiperf"),
    Client("promtool", "promtool.py", ""),
    Client("openai", "openai.mjs"),
    Client("ai", "ai_sdk.mjs"),
    Client("openai-agents", "openai_agents.py", "openai-agents", model="agent"),
    Client("instructor", "instructor_agent.py", model="agent"),
    Client("pydantic-ai-slim", "pydantic_ai_agent.py", model="agent"),
    Client("langgraph", "langgraph_agent.py", "langgraph", model="agent"),
    Client("llama-index-core", "llama_index_agent.py", model="agent"),
    Client("smolagents", "smolagents_agent.py", "smolagents", model="agent"),
    Client("crewai", "crewai_agent.py", "crewai", model="agent"),
    Client("autogen-agentchat", "autogen_agent.py", "autogen", model="agent"),
    Client("semantic-kernel", "semantic_kernel_agent.py", "semantic-kernel", model="agent"),
    Client("ai", "ai_sdk_agent.mjs", model="agent"),
)
