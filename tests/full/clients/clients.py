"""The clients of other people, and the programs that use them against a server."""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
INSTALLED = Path(__file__).parents[3] / "build" / "clients"
PYTHON, NODE = INSTALLED / "python" / "bin" / "python", INSTALLED / "node"
SECONDS = 240  # litellm alone takes half a minute to import on a busy machine


@dataclass(frozen=True)
class Client:
    """A package and the program that uses it."""

    package: str
    program: str

    @property
    def node(self) -> bool:
        """It is of npm."""
        return self.program.endswith(".mjs")

    @property
    def installed(self) -> bool:
        """It is there; `make clients` installs all."""
        return (NODE / "node_modules" / self.package).is_dir() if self.node else PYTHON.is_file()

    @property
    def version(self) -> str:
        """The installed version."""
        if self.node:
            return str(json.loads((NODE / "node_modules" / self.package / "package.json").read_text())["version"])
        code = f"import importlib.metadata as m; print(m.version({self.package!r}))"
        return subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    def run(self, base: str, model: str) -> subprocess.CompletedProcess[str]:
        """Use the server; the program prints what it called."""
        program, folder = PROGRAMS / self.program, INSTALLED
        if self.node:  # packages are looked for beside the program
            program, folder = NODE / self.program, NODE
            program.write_text((PROGRAMS / self.program).read_text())
        return subprocess.run(
            ["node" if self.node else str(PYTHON), str(program), base, model],
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
    Client("tritonclient", "tritonclient_http.py"),
    Client("openai", "openai.mjs"),
    Client("ai", "ai_sdk.mjs"),
)
