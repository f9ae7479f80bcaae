"""Run the commands of a tutorial or a how-to, and compare their output with the page."""

import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock
from transformers import PreTrainedTokenizerFast

from sharp.models.byte_tokenizer import byte_tokenizer
from tests.exporter.tiny_hugging_face import tiny

ROOT = Path(__file__).parents[3]
PAGES = {page.stem: page for folder in ("tutorials", "how-to") for page in (ROOT / "docs" / folder).glob("*.md")}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# a command and the output that the page shows; no output means that it is not compared
COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
FILES = {
    "own-normalizer": {"python": ["softmax1.py"], "toml": ["pyproject.toml"]},
    "dispersed-heads": {"yaml": ["alerts.yml", "prometheus.yml"]},
    "train-with-ssa": {"python": ["train.py"]},
    "structured-output": {"python": ["ask.py"]},
}
# Shorter training, because a reader's training takes minutes, and some models have 135 million parameters.
SHORTER = {
    "--budget 20m": "--length 24 --tokens 240",
    "STEPS, BATCH, LENGTH = 300, 8, 128": "STEPS, BATCH, LENGTH = 2, 1, 8",
    "--lengths 512,1k,2k,4k": "--lengths 2k --documents 1",
}
TINY = {"sparse-model": "smollm2.gguf"}  # a tiny model in place of the one that the commands fetch
FETCH = ("pip install", "ln -s")
CHECKPOINTS = "models/checkpoints"
SSA = {"model.safetensors": f"{CHECKPOINTS}/text-ssa.safetensors"}
GIVEN = {  # files that a reader already has: names in the folder, and files of the repository
    "own-normalizer": SSA,
    "dispersed-heads": {
        name: f"{CHECKPOINTS}/{name}" for name in ("text-softmax.safetensors", "text-asentmax.safetensors")
    },
    "quantize": SSA,
    "structured-output": SSA,
    "long-contexts": SSA | {"text.txt": "LICENSE"},
    "tune": SSA,
}
READY = {"sharp serve": "http://localhost:8000/health/ready", "prometheus": "http://localhost:9090/-/ready"}
PORTS_LOCK = ROOT / "build" / "tutorial.lock"
EXPORTED: dict[tuple[str, str], Path] = {}  # exports that other pages with the same command and file reuse
SCRAPED = 20.0  # seconds within which the output of a Prometheus query must match the page


@contextmanager
def servers(work: Path, variables: dict[str, str]) -> Iterator[Callable[[str, str], None]]:
    """Yield a function that starts a server's command, waits until its address responds, and ends an earlier one."""
    running: dict[str, subprocess.Popen[bytes]] = {}

    def start(program: str, command: str) -> None:
        end(program)
        log = (work.parent / f"{program}.log").open("wb")
        running[program] = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=work, env=variables, stdout=log, stderr=log
        )
        deadline = time.monotonic() + 120
        while not responds(READY[program]):
            assert running[program].poll() is None and time.monotonic() < deadline, Path(log.name).read_text()
            time.sleep(0.2)

    def end(program: str) -> None:
        if program in running:
            running[program].terminate()
            running.pop(program).wait(60)

    try:
        yield start
    finally:
        for program in tuple(running):
            end(program)


def responds(address: str) -> bool:
    """Whether an address serves a page."""
    try:
        with urllib.request.urlopen(address, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def run(command: str, shown: str, work: Path, variables: dict[str, str]) -> None:
    """Run a command of a tutorial, and compare its output with `shown` unless that is empty."""
    deadline = time.monotonic() + SCRAPED * command.startswith("promtool")
    while True:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=work,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        if not shown or done.stdout == shown or time.monotonic() > deadline:
            break
        time.sleep(1)
    if shown:
        assert done.stdout == shown, f"{command}\n{done.stdout}"


def export(command: str, source: str, work: Path, variables: dict[str, str]) -> None:
    """Run an export of a page, or copy the folder of another page's same export."""
    folder = work / command.rpartition(" -o ")[2]
    made = EXPORTED.setdefault((command, source), folder)
    if made == folder:
        run(command, "", work, variables)
    else:
        shutil.copytree(made, folder)


def tiny_folder(folder: Path) -> None:
    """Save a tiny Llama of Hugging Face with a tokenizer."""
    tiny("llama", vocab_size=300).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer()).save_pretrained(folder)


def shortened(page: str) -> str:
    """Return the text of a page with less training."""
    for long, short in SHORTER.items():
        page = page.replace(long, short)
    return page


def run_tutorial(name: str, work: Path, variables: dict[str, str]) -> None:
    """Write the files of a page into the new folder `work`, and run its commands there.

    The commands use the ports that a reader would use, so tests that use them wait for each other.
    """
    work.mkdir()
    for given, source in GIVEN.get(name, {}).items():
        (work / given).symlink_to(ROOT / source)
    if name in TINY:
        tiny_folder(work / TINY[name])
    files = {kind: list(names) for kind, names in FILES.get(name, {}).items()}
    ran = 0
    with FileLock(PORTS_LOCK), servers(work, variables) as start:
        for kind, content in BLOCK.findall(shortened(PAGES[name].read_text())):
            if files.get(kind):
                (work / files[kind].pop(0)).write_text(content)
            for command, shown in COMMAND.findall(content) if kind == "console" else ():
                server = next((name for name in READY if command.startswith(f"{name} ")), None)
                if name in TINY and command.startswith(FETCH):
                    continue
                if server:
                    start(server, command)
                elif command.startswith("sharp export model.safetensors") and not shown:
                    export(command, GIVEN[name]["model.safetensors"], work, variables)
                else:
                    run(command, shown, work, variables)
                ran += 1
    assert ran
    assert not any(files.values())
