"""The memory and the time that `sharp-export` takes, for a Llama of random weights of a chosen size.

python -m bench.export_memory [--hidden 2048] [--layers 16] [--output bench/results/export_memory.json]

The model is written to a temporary folder as safetensors, exported by the installed command, and measured from outside
ten times a second: "peak_rss" is its largest resident size, "peak_pss" the same with a page that is mapped twice
counted once. The target is at most 1.3 times the float32 weights and 2 GB.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.result_file import header, write
from sharp.core.cli import SharpCommand

TARGET_FACTOR, TARGET_BYTES = 1.3, 2_000_000_000


def write_model(folder: Path, hidden: int, layers: int, vocab: int, dtype: torch.dtype) -> int:
    """Write a random Llama with untied embeddings in safetensors of 1 GB, and return the number of its parameters.

    `hidden` is a multiple of 256. Torch's default dtype becomes `dtype`, for the whole process.
    """
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 256,
        max_position_embeddings=4096,
    )
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="1GB")
    return sum(parameter.numel() for parameter in model.parameters())


def sizes(process: int) -> dict[str, int]:
    """Return Rss and Pss of a process in bytes; empty once it has ended."""
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:
        return {}
    return {name: 1024 * int(found) for name, found in re.findall(r"^(Rss|Pss):\s+(\d+)", text, re.MULTILINE)}


def measure(command: list[str]) -> dict[str, float]:
    """Run a command (`sharp-export`), and return its seconds, and peak_rss and peak_pss in bytes.

    Raises:
        CalledProcessError: the export failed.
    """
    started = time.monotonic()
    peak = {"Rss": 0, "Pss": 0}
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            for name, size in sizes(process.pid).items():
                peak[name] = max(peak[name], size)
            time.sleep(0.1)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return {"seconds": time.monotonic() - started, "peak_rss": peak["Rss"], "peak_pss": peak["Pss"]}


@click.command(cls=SharpCommand)
@click.option("--hidden", default=2048, help="Hidden size; a multiple of 256.")
@click.option("--layers", default=16, help="Layers.")
@click.option("--vocab", default=32000, help="Vocabulary.")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="bfloat16", help="Of the checkpoint.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the result here as JSON.")
@click.argument("options", nargs=-1)
def main(hidden: int, layers: int, vocab: int, dtype: str, output: Path | None, options: tuple[str, ...]) -> None:
    """Measure one export; OPTIONS are passed on to sharp-export."""
    with tempfile.TemporaryDirectory() as work:
        source = Path(work, "model")
        parameters = write_model(source, hidden, layers, vocab, getattr(torch, dtype))
        command = [str(Path(sys.executable).with_name("sharp-export")), str(source), "-o", str(Path(work, "out"))]
        measured = measure([*command, *(options or ("--norm", "softmax"))])
    target = int(TARGET_FACTOR * 4 * parameters) + TARGET_BYTES
    result = {
        **header("export_memory", ("sharp-attention", "torch", "onnx", "onnxruntime", "transformers")),
        "parameters": parameters,
        "weights_float32": 4 * parameters,
        "checkpoint_dtype": dtype,
        "options": options,
        "target_bytes": target,
        **measured,
    }
    click.echo(json.dumps(result, indent=2))
    write(output, result)


if __name__ == "__main__":
    main()
