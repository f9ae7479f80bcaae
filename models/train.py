"""`python -m sharp.models.train TASK`, which trains a model and writes its checkpoint.

TASK is `text`, the byte-level language model of the demo, or a task of `sharp.models.tasks.registry`.
"""

import os
import shutil
from pathlib import Path
from typing import Any, get_args

import click
import torch
from rich.console import Console

from sharp.core.cli import SharpCommand, if_interrupted
from sharp.core.errors import InputError
from sharp.models.bits_per_byte import bits_per_byte
from sharp.models.byte_tokenizer import END_OF_TEXT_ID, VOCAB_SIZE
from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.checkpoint import save_checkpoint, start_from
from sharp.models.config import Positions, SharpConfig
from sharp.models.device import choose_device
from sharp.models.evaluation import TEXT
from sharp.models.norms import NORMS
from sharp.models.objective import TrainingBatch
from sharp.models.plots import plot_losses
from sharp.models.tasks.recipe import (
    Choices,
    changed_parameters,
    choose_task,
    fix_ssa_n,
    fixed_temperature,
    make_model,
    make_settings,
)
from sharp.models.tasks.registry import TASKS, get_task
from sharp.models.tasks.scoring import memory_of, score
from sharp.models.tasks.task import Task
from sharp.models.text import Corpus, load_corpora
from sharp.models.trainer import Stage, TrainSettings, train

VALIDATION_SAMPLES = 512
VALIDATION_SEED = 0
TEXT_STEPS = 5000


def text_config(norm: str, temperature: float = 1.0) -> SharpConfig:
    """Return the configuration of the demo model, which has 3.1 million parameters and reads and writes bytes."""
    return SharpConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        layers=4,
        q_heads=8,
        kv_heads=2,
        head_dim=32,
        norm=norm,
        temperature=temperature,
        positions="nape",
        trained_context=512,
        max_context=65536,
        tokenizer="bytes",
        bos_token_id=END_OF_TEXT_ID,
        eos_token_ids=(END_OF_TEXT_ID,),
    )


def text_settings(steps: int, seed: int, compile_model: bool) -> TrainSettings:
    """Return the settings of the demo: most steps on short sequences, which cost less, the last fifth on 512 tokens.

    The run has `steps` steps; `compile_model` compiles the model with torch.compile.
    """
    stages = (Stage(0, 128), Stage(steps * 2 // 5, 256), Stage(steps * 4 // 5, 512))
    return TrainSettings(steps=steps, batch_tokens=4096, stages=stages, seed=seed, bfloat16=True, compile=compile_model)


def sample_windows(corpora: list[Corpus], sequences: int, length: int, generator: torch.Generator) -> TrainingBatch:
    """Sample windows at random positions of corpora chosen by their share; targets are the next tokens.

    Inputs and targets are int64 [sequences, length]. All randomness comes from `generator`.
    """
    shares = torch.tensor([corpus.share for corpus in corpora])
    rows = []
    for index in torch.multinomial(shares, sequences, replacement=True, generator=generator).tolist():
        tokens = corpora[index].train
        start = int(torch.randint(len(tokens) - length, (), generator=generator))
        rows.append(tokens[start : start + length + 1])
    windows = torch.stack(rows).long()  # [sequences, length + 1]
    return TrainingBatch((windows[:, :-1],), windows[:, 1:])


def train_text(
    console: Console,
    config: SharpConfig,
    steps: int,
    seed: int,
    compile_model: bool,
    device: torch.device,
    output: Path,
    work: Path,
) -> None:
    """Train the demo's language model, and write it to `output` in float16 and its losses beside it.

    The losses are in `output` with the suffix .loss.csv. A run that was killed continues from its state in `work`.

    Raises:
        SharpError: the corpus cannot be downloaded, the run cannot be resumed, or its loss is not finite.
    """
    corpora = load_corpora()
    model = SharpForCausalLM(config).to(device)
    settings = text_settings(steps, seed, compile_model)
    held_out = corpora[0].validation.to(device)
    console.print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {model.config}")
    console.print(settings)
    for corpus in corpora:
        console.print(f"{corpus.name}: {len(corpus.train):,} bytes to train on, {len(corpus.validation):,} held out")
    train(
        model,
        lambda sequences, length, generator: sample_windows(corpora, sequences, length, generator),
        lambda trained: bits_per_byte(trained, held_out),
        settings,
        work,
        task=TEXT,
    )
    save_checkpoint(output, model, torch.float16, TEXT)
    shutil.copyfile(work / "loss.csv", output.with_suffix(".loss.csv"))
    for length in (256, 512, 1024, 2048):
        found = bits_per_byte(model, held_out, length)
        console.print(f"{corpora[0].name}, held out, windows of {length}: {found:.4f} bits per byte")


def train_task(
    console: Console,
    name: str,
    choices: Choices,
    parameters: tuple[str, ...],
    first: Path | None,
    device: torch.device,
    output: Path,
    work: Path,
    validation_length: int | None = None,
    validation_samples: int = VALIDATION_SAMPLES,
) -> None:
    """Train a model on a task of the registry, and write it to `output` in float16 and its losses beside it.

    The losses are in `output` with the suffix .loss.csv. A run that was killed continues from its state in `work`.
    `first` is a checkpoint to start from, None for new weights. With `validation_length`, the model is validated on
    samples of this length, and the weights of the best validation are written instead of those of the last step.

    Raises:
        SharpError: a choice is not possible, the run cannot be resumed, or its loss is not finite.
    """
    task = choose_task(get_task(name), choices, parameters)
    changed = changed_parameters(get_task(name).sampler, task.sampler)
    check_size(task, choices, device)
    model = make_model(task, choices).to(device)
    if first is not None:
        start_from(model, first)
    fix_ssa_n(model, choices.ssa_n)
    settings = make_settings(task, choices)
    length = validation_length or task.longest_training_length
    task.sampler.tokens(length)  # refuses impossible lengths
    console.print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {model.config}")
    console.print(task.sampler)
    console.print(settings)
    train(
        model,
        task.sampler.sample,
        lambda trained: score(trained, task.sampler, task.metric, length, validation_samples, VALIDATION_SEED).mean,
        settings,
        work,
        measure=task.metric,
        task=task.name,
        data=str(task.sampler)
        + ("" if first is None else f" from {first}")
        + ("" if choices.ssa_n is None else f", n {choices.ssa_n:g}")
        + ("" if validation_length is None else f", best of {validation_samples} at {validation_length}"),
        task_parameters=changed,
        best=None if validation_length is None else min if task.metric == "squared_error" else max,
    )
    save_checkpoint(output, model, torch.float16, task.name, changed)
    shutil.copyfile(work / "loss.csv", output.with_suffix(".loss.csv"))
    found = score(model, task.sampler, task.metric, length, validation_samples, VALIDATION_SEED)
    console.print(
        f"{task.metric} at {length} {task.length_name}: {found.mean:.4f}; evaluate {output} for other lengths"
    )


def check_size(task: Task, choices: Choices, device: torch.device) -> None:
    """Check that the model to be trained fits into the device's memory with its gradients and optimizer state.

    Raises:
        InputError: the model does not fit.
    """
    try:
        with torch.device("meta"):
            parameters = sum(parameter.numel() for parameter in make_model(task, choices).parameters())
    except RuntimeError as error:  # raised if a size exceeds the address space
        raise InputError(f"no model can have these sizes: {error}; choose smaller ones") from error
    needed, there = 4 * 4 * parameters, memory_of(device)  # bytes: float32 weights, gradients and Adam's two moments
    if needed > there:
        raise InputError(
            f"{parameters:,} parameters need {needed / 2**30:,.0f} GiB in training, there are {there / 2**30:.0f}; "
            "choose a smaller --hidden-size, --intermediate-size or --layers"
        )


def parse_range(text: str) -> tuple[int, int]:
    """Parse a range LOW-HIGH of lengths, or one length, and return its ends; their order is not checked.

    Raises:
        InputError: the text is neither.
    """
    low, _, high = text.partition("-")
    if not (low.isdecimal() and (high or low).isdecimal()):
        raise InputError(f"--lengths is {text!r}, but must be two whole numbers as 32-64")
    return int(low), int(high or low)


@click.command(cls=SharpCommand, context_settings={"show_default": True})
@click.argument("task", type=click.Choice([TEXT, *TASKS]))
@click.option("--norm", type=click.Choice(list(NORMS)), default="ssa", help="Attention scheme to train with.")
@click.option("--temperature", type=float, help="Temperature of norm fixed-temperature; it divides the logits.")
@click.option(
    "--steps", type=click.IntRange(min=10), help=f"Optimizer steps.  [default: {TEXT_STEPS} for text, else the paper's]"
)
@click.option("--seed", default=0, help="Seed of the weights and of the samples or the order of the text.")
@click.option("--threads", type=click.IntRange(min=1), default=2, help="CPU threads.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Device for training.")
@click.option(
    "--compile/--no-compile",
    "compile_model",
    default=None,
    help="Use torch.compile (needs a C++ compiler).  [default: compile for text only]",
)
@click.option(
    "--output", type=click.Path(path_type=Path), help="Checkpoint to write.  [default: WORK/model.safetensors]"
)
@click.option(
    "--work",
    type=click.Path(path_type=Path),
    help="Folder for the state of the run, to resume from.  [default: build/train/TASK-NORM[-seedN]]",
)
@click.option("--set", "parameters", multiple=True, help="A parameter of the task, as FIELD=VALUE; repeatable.")
@click.option("--lengths", help="Lengths to train on, as 32-64.  [default: the paper's]")
@click.option("--length-step", type=click.IntRange(min=1), help="Train only on every N-th length.")
@click.option("--positions", type=click.Choice(get_args(Positions)), help="Position encoding.  [default: nape]")
@click.option(
    "--rope-factor", type=click.FloatRange(min=1), help="Factor of RoPE scaling, as in Llama 3.  [default: 16]"
)
@click.option("--alpha", type=float, help="Alpha of entmax.  [default: the norm's]")
@click.option("--gamma", type=float, help="Fixed gamma of sentmax, asentmax and assmax.  [default: learned]")
@click.option("--ssa-n", type=float, help="Exponent n of ssa, fixed in all heads.  [default: learned]")
@click.option("--layers", type=click.IntRange(min=1), help="Number of layers.  [default: the paper's]")
@click.option("--heads", type=click.IntRange(min=1), help="Number of attention heads.  [default: the paper's]")
@click.option("--hidden-size", type=click.IntRange(min=1), help="Width of the model.  [default: the paper's]")
@click.option(
    "--intermediate-size", type=click.IntRange(min=1), help="Width of the feed-forward part.  [default: the paper's]"
)
@click.option("--batch", type=click.IntRange(min=1), help="Samples per step.  [default: the paper's]")
@click.option("--learning-rate", type=float, help="Highest learning rate.  [default: the paper's]")
@click.option(
    "--final-learning-rate", type=float, help="Learning rate at the end of the cosine schedule.  [default: the paper's]"
)
@click.option(
    "--start-from", type=click.Path(path_type=Path), help="Checkpoint with the first weights; its norm may be another."
)
@click.option(
    "--validation-length",
    type=click.IntRange(min=1),
    help="Length of the validation, which chooses the best checkpoint of the run.  [default: the longest; the last "
    "one]",
)
@click.option(
    "--validation-samples",
    type=click.IntRange(min=1),
    help=f"Samples of a validation.  [default: {VALIDATION_SAMPLES}]",
)
@click.option(
    "--bf16/--no-bf16", "bfloat16", default=None, help="Train in bfloat16.  [default: on a GPU, but for max-retrieval]"
)
def main(
    task: str,
    norm: str,
    steps: int | None,
    seed: int,
    threads: int,
    device: str,
    compile_model: bool | None,
    output: Path | None,
    work: Path | None,
    parameters: tuple[str, ...],
    lengths: str | None,
    temperature: float | None,
    bfloat16: bool | None,
    start_from: Path | None,
    validation_length: int | None,
    validation_samples: int | None,
    **sizes: Any,
) -> None:
    """Train the model of TASK; an interrupted run resumes from its last saved state.

    Options from --set on are for tasks other than text.
    """
    console = Console()
    run = f"{task}-{norm}" + (f"-seed{seed}" if seed and task != TEXT else "")
    work = work or Path("build/train") / run
    output = output or work / "model.safetensors"
    if_interrupted(f"what was trained until the last save is in {work}; the same command goes on from there")
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    chosen_device = choose_device(device)
    compiled = task == TEXT if compile_model is None else compile_model
    if compiled and shutil.which(os.environ.get("CXX", "g++")) is None:
        raise InputError("torch.compile needs a C++ compiler (g++, or the one that CXX names); or pass --no-compile")
    given = {name: value for name, value in sizes.items() if value is not None}
    if task == TEXT:
        validated = validation_length or validation_samples
        if parameters or lengths or given or start_from or validated or bfloat16 is not None:
            raise InputError("text is trained with its own sizes and lengths; leave out --set and what follows it")
        config = text_config(norm, fixed_temperature(norm, temperature))
        train_text(console, config, steps or TEXT_STEPS, seed, compiled, chosen_device, output, work)
    else:
        if bfloat16 is None:
            bfloat16 = chosen_device.type == "cuda" and task != "max-retrieval"
        choices = Choices(
            norm,
            temperature=temperature,
            steps=steps,
            lengths=None if lengths is None else parse_range(lengths),
            seed=seed,
            bfloat16=bfloat16,
            compile=compiled,
            **given,
        )
        train_task(
            console,
            task,
            choices,
            parameters,
            start_from,
            chosen_device,
            output,
            work,
            validation_length,
            validation_samples or VALIDATION_SAMPLES,
        )
    if hint := plot_losses(work / "loss.csv", work / "loss.png"):
        console.print(hint)


if __name__ == "__main__":
    main()
