"""`python -m sharp.models.train TASK`: train a model and write its checkpoint.

The one task so far is `text`, the byte-level language model of the demo.
"""

import math
import os
import shutil
import sys
from pathlib import Path

import click
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional

from sharp.models.byte_tokenizer import END_OF_TEXT_ID, VOCAB_SIZE
from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.checkpoint import save_checkpoint
from sharp.models.config import SharpConfig
from sharp.models.normalizers import NORMS
from sharp.models.text import Source, load_sources
from sharp.models.trainer import Stage, TrainSettings, train
from sharp.plugins.errors import InputError, SharpError

CHECKPOINTS = Path("models/checkpoints")
VALIDATION_LENGTH = 512


def text_config(norm: str) -> SharpConfig:
    """The demo model: 3.1 million parameters, bytes in and out."""
    return SharpConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        layers=4,
        q_heads=8,
        kv_heads=2,
        head_dim=32,
        norm=norm,
        positions="nape",
        trained_context=512,
        max_context=65536,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_ids=(END_OF_TEXT_ID,),
    )


def text_settings(steps: int, seed: int, compile_model: bool) -> TrainSettings:
    """Most steps on short sequences, as attention's cost per token grows with the length; the last fifth on 512."""
    stages = (Stage(0, 128), Stage(steps * 2 // 5, 256), Stage(steps * 4 // 5, 512))
    return TrainSettings(steps=steps, batch_tokens=4096, stages=stages, seed=seed, bfloat16=True, compile=compile_model)


def sample_windows(sources: list[Source], sequences: int, length: int, generator: torch.Generator) -> Tensor:
    """int64 [sequences, length + 1]: windows at random places of sources that are drawn by their share."""
    shares = torch.tensor([source.share for source in sources])
    rows = []
    for index in torch.multinomial(shares, sequences, replacement=True, generator=generator).tolist():
        tokens = sources[index].train
        start = int(torch.randint(len(tokens) - length, (), generator=generator))
        rows.append(tokens[start : start + length + 1])
    return torch.stack(rows).long()


@torch.no_grad()
def bits_per_byte(model: SharpForCausalLM, tokens: Tensor, length: int = VALIDATION_LENGTH) -> float:
    """Cross entropy in bits of `tokens` [tokens], in windows of `length` that do not overlap."""
    windows = tokens[: (len(tokens) - 1) // length * length + 1].long()
    inputs, targets = windows[:-1].view(-1, length), windows[1:].view(-1, length)
    total = 0.0
    for row, wanted in zip(inputs.split(1), targets.split(1), strict=True):  # one at a time stays in the CPU's cache
        total += functional.cross_entropy(model(row).flatten(0, 1), wanted.flatten(), reduction="sum").item()
    return total / targets.numel() / math.log(2)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("task", type=click.Choice(["text"]))
@click.option("--norm", type=click.Choice(list(NORMS)), default="ssa", help="Attention scheme to train with.")
@click.option("--steps", type=click.IntRange(min=10), default=5000, help="Optimizer steps of 4096 tokens.")
@click.option("--seed", default=0, help="Seed of the weights and of the order of the text.")
@click.option("--threads", type=click.IntRange(min=1), default=2, help="CPU threads.")
@click.option("--compile/--no-compile", "compile_model", default=True, help="Use torch.compile (needs a C++ compiler).")
@click.option("--output", type=click.Path(path_type=Path), help="Checkpoint.  [default: models/checkpoints/TASK-NORM]")
@click.option("--work", type=click.Path(path_type=Path), help="State to resume from.  [default: build/train/TASK-NORM]")
def main(
    task: str,
    norm: str,
    steps: int,
    seed: int,
    threads: int,
    compile_model: bool,
    output: Path | None,
    work: Path | None,
) -> None:
    """Train the model of TASK; a run that was killed goes on where it was saved last."""
    console = Console()
    output = output or CHECKPOINTS / f"{task}-{norm}.safetensors"
    work = work or Path("build/train") / f"{task}-{norm}"
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    try:
        if compile_model and shutil.which(os.environ.get("CXX", "g++")) is None:
            raise InputError(
                "torch.compile needs a C++ compiler (g++, or the one that CXX names); or pass --no-compile"
            )
        sources = load_sources()
        model = SharpForCausalLM(text_config(norm))
        settings = text_settings(steps, seed, compile_model)
        held_out = sources[0].validation
        console.print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {model.config}")
        console.print(settings)
        for source in sources:
            console.print(
                f"{source.name}: {len(source.train):,} bytes to train on, {len(source.validation):,} held out"
            )
        train(
            model,
            lambda sequences, length, generator: sample_windows(sources, sequences, length, generator),
            lambda trained: bits_per_byte(trained, held_out),
            settings,
            work,
        )
        save_checkpoint(output, model, torch.float16)
        shutil.copyfile(work / "loss.csv", output.with_suffix(".loss.csv"))
        for length in (256, 512, 1024, 2048, 4096):
            found = bits_per_byte(model, held_out, length)
            console.print(f"{sources[0].name}, held out, windows of {length}: {found:.4f} bits per byte")
    except SharpError as error:
        Console(stderr=True).print(f"error: {error}", highlight=False, markup=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
