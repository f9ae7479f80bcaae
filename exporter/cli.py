"""The command `sharp-export` (also `sharp export`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from sharp.core.cli import SharpCommand
from sharp.core.table import Table
from sharp.exporter.export_command import ExportFlags, run_export
from sharp.exporter.ignore_key import ignore_key_option


def print_architectures(context: click.Context, _option: click.Parameter, requested: bool) -> None:
    """Print the table of architectures and exit, as the callback of `--list`."""
    if not requested or context.resilient_parsing:
        return
    from sharp.exporter.checkpoints.architectures import ARCHITECTURES

    table = Table(title="Hugging Face models (GGUF too, where transformers reads it)", title_justify="left")
    for name in ("model_type", "models", "kind", "positions", "attention"):
        table.add_column(name)
    for architecture in ARCHITECTURES.values():
        table.add_row(
            architecture.model_type,
            architecture.models,
            architecture.kind,
            architecture.positions,
            architecture.notes,
        )
    console = Console()
    console.print(table)
    console.print("Sharp's own checkpoints can be exported, too: decoders, encoders, set models and models of numbers.")
    context.exit()


GROUPS = {
    "Norm": (
        "--norm",
        "--untrained-norm",
        "--norm-map",
        "--trained-norm",
        "--alpha",
        "--ssa-b",
        "--ssa-n",
        "--temperature",
        "--temperature-coefficients",
        "--log-length-offset",
        "--length-onset",
    ),
    "Model": (
        "--cache",
        "--target",
        "--head",
        "--ignore-key",
        "--max-context",
        "--block-size",
        "--key-screen",
        "--opset",
    ),
    "Precision": ("--dtype", "--kv-dtype", "--quantize"),
    "Program": ("--tokenizer", "--norm-parameter"),
    "Class": ("--weights", "--weights-entry", "--arg", "--config-class", "--example"),
    "Output": ("--output", "--dry-run", "--text", "--json", "--quiet"),
}
COMMON = (
    *("--norm", "--untrained-norm", "--cache", "--target", "--max-context", "--dtype", "--kv-dtype", "--quantize"),
    *("--output", "--dry-run", "--list", "--help"),
)


@click.command(
    "export",
    cls=SharpCommand,
    groups=GROUPS,
    common=COMMON,
    epilog="See also: sharp docs exporting, sharp docs reference/architectures, sharp inspect, sharp serve.",
)
@click.argument("source", type=click.Path(path_type=Path))
@click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=print_architectures,
    help="Print the architectures that can be exported, and exit.",
)
@click.option(
    "--norm",
    metavar="NAME",
    help="The attention scheme: softmax, fixed-temperature, adaptive-temperature, ssmax, ssmax-bias, assmax, entmax, "
    "sparsemax, sentmax, asentmax, ssa, sigmoid, sigmoid-n, relu, relu-n, relu2, relu2-n, softpick, log-power, llama4 "
    "or one of your own.  "
    "[default: the norm that the checkpoint names, else softmax; for a .pt2 program, the norm in its graph]",
)
@click.option(
    "--cache",
    type=click.Choice(["paged", "contiguous", "none"]),
    default="paged",
    show_default=True,
    help="The key-value cache of the model: paged is the form that sharp-serve needs to generate text; contiguous has "
    "past and present inputs for other tools; none computes whole sequences, which is the only form of encoders, set "
    "models and models of numbers.",
)
@click.option(
    "--target",
    type=click.Choice(["onnxruntime", "tensorrt", "portable"]),
    help="The runtime for the model: onnxruntime keeps attention as one node, for Sharp's kernels (without them, ONNX "
    "Runtime replaces it by standard ops); tensorrt keeps only the node, for Sharp's TensorRT plugin; portable has "
    "standard ops only, for every other tool and for a normalizer of your own.  [default: onnxruntime, or portable for "
    "such a norm]",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="The model folder to write; it must be new or empty.  [default: <source name>-<norm>]",
)
@click.option(
    "--norm-map",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A file with other norms for some layers and heads: TOML or JSON with entries [[norms]] of norm, layers, "
    "heads and the norm's options.",
)
@click.option(
    "--trained-norm",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A file with the learned parameters of the norm of a Hugging Face model: TOML or JSON with norm, its options "
    "and [parameters], the names of weights, in which {layer} stands for the layer's number.  [default: the entry "
    "trained_norm of config.json]",
)
@click.option(
    "--head",
    type=click.Choice(["masked-lm", "embedding", "classification"]),
    help="The output of a Hugging Face encoder: logits of tokens, hidden states for embeddings, or the logits of a "
    "classification head, such as a reranker's.  [default: the head that the checkpoint was saved with]",
)
@click.option(
    "--alpha",
    type=float,
    metavar="A",
    help="Alpha of entmax, above 1 and at most 64 (at most 4 on GPUs).  [default: the checkpoint's, or 1.5]",
)
@click.option("--ssa-b", type=float, metavar="B", help="b of norm ssa in all heads.  [default: the checkpoint's, or 1]")
@click.option(
    "--ssa-n", type=float, metavar="N", help="n of norm ssa in all heads.  [default: the checkpoint's, or 1.5]"
)
@click.option(
    "--temperature",
    type=float,
    metavar="T",
    help="The temperature of norm fixed-temperature, which divides the logits.  [default: the checkpoint's]",
)
@click.option(
    "--temperature-coefficients",
    metavar="FILE",
    help="The polynomial of norm adaptive-temperature: a file of sharp fit-temperature, icml2025, arxiv2024 or "
    "icml2025-long.  "
    "[default: the checkpoint's, else icml2025]",
)
@click.option(
    "--log-length-offset",
    type=int,
    metavar="O",
    help="The length scales of ssmax, ssmax-bias, assmax, sentmax and asentmax grow with ln(i + O) at position "
    "i = 0, 1, ...  [default: 2]",
)
@click.option(
    "--length-onset",
    type=int,
    metavar="N",
    help="The scales of log-power and llama4 are 1 up to N tokens and grow beyond.  [default: the trained context]",
)
@click.option(
    "--tokenizer",
    metavar="FILE",
    help="The tokenizer of a model without one (a .pt2 program, FILE.py:CLASS): a tokenizer.json, a folder with one, "
    "or bytes.",
)
@click.option(
    "--norm-parameter",
    "norm_parameters",
    multiple=True,
    metavar="NAME=TENSOR",
    help="A learned parameter of the norm of a .pt2 program (b and n of ssa, s of ssmax, beta and gamma of sentmax, "
    "w_beta and w_gamma of assmax and asentmax), as NAME=NUMBER or NAME=TENSOR; {layer} in the name of a tensor stands "
    "for the layer's number.",
)
@click.option(
    "--weights",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The weights for FILE.py:CLASS: a .safetensors file, the index of several (.safetensors.index.json), or a "
    "file of torch.save with a state dict or with a trainer's checkpoint.",
)
@click.option(
    "--weights-entry",
    metavar="NAME",
    help="The key of the weights in the file of --weights, if it has several: ema, say, or state_dict.model.  "
    "[default: the key under which all names of the class are]",
)
@click.option(
    "--arg",
    "arguments",
    multiple=True,
    metavar="NAME=VALUE",
    help="An argument of the class, as NAME=VALUE: a number, true, false, JSON or text; repeatable.  [default: the "
    "arguments that the file of --weights has in model_args, config or hyper_parameters, if the class takes them]",
)
@click.option(
    "--config-class",
    metavar="NAME",
    help="The type of the class's only argument, whose fields --arg sets: a class in the same file, namespace or "
    "dict.  [default: the file's dataclass]",
)
@click.option(
    "--example",
    metavar="FUNCTION",
    help="A function in the same file that returns example inputs of the model: a tensor, a tuple or a dict.  "
    "[default: token ids]",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Type of weights and activations; logits are float32.",
)
@click.option(
    "--kv-dtype",
    type=click.Choice(["float32", "float16", "bfloat16", "int8", "fp8"]),
    help="Type of the paged cache; int8 and fp8 (e4m3) need Sharp's kernels.  [default: that of --dtype]",
)
@click.option(
    "--quantize",
    type=click.Choice(["int8", "int4", "int4-128"]),
    help="Store the weights of matrix products, and of an embedding that is tied to one, in 8 or 4 bits; int4-128 is "
    "for GPUs.",
)
@click.option(
    "--block-size",
    type=int,
    default=16,
    show_default=True,
    help="Tokens in a block of the paged cache, a multiple of 16.",
)
@click.option(
    "--max-context",
    type=int,
    metavar="TOKENS",
    help="The longest prompt and completion that a server accepts.  [default: the checkpoint's]",
)
@click.option(
    "--key-screen",
    type=click.Choice(["auto", "int8", "none"]),
    default="auto",
    show_default=True,
    help="Keep an 8-bit copy of the keys of entmax heads, so that decoding reads only a few full keys; the result does "
    "not change. auto: for a float32 cache, contexts of 8,192 tokens or more, and positions without ALiBi.",
)
@click.option("--opset", type=int, default=23, show_default=True, help="The version of ONNX's standard ops, 18 to 25.")
@click.option(
    "--untrained-norm",
    is_flag=True,
    help="Allow a norm that the checkpoint was not trained with, and show what it does to the perplexity of a text.",
)
@click.option(
    "--text",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The text to measure perplexity on.  [default: Sharp's licence, with --untrained-norm or --quantize]",
)
@click.option(
    "--sampling",
    multiple=True,
    metavar="NAME=VALUE",
    help="Sampling parameters for requests that do not set them: temperature, top_k, top_p, min_p or "
    "repetition_penalty; repeatable.  [default: the checkpoint's]",
)
@ignore_key_option
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("--json", "as_json", is_flag=True, help="Print the report (or the plan of a dry run) as JSON on stdout.")
@click.option("--dry-run", is_flag=True, help="Print what would be written and the memory it takes; write nothing.")
def export(**flags: Any) -> None:
    """Export the checkpoint SOURCE to a model folder that every ONNX runtime can load.

    SOURCE is a Hugging Face folder (config.json and safetensors) or its id on the Hub, a .gguf file, a .pt or
    .safetensors file of Sharp's own, a .pt2 file of torch.export.save, whatever model that is, or FILE.py:CLASS with
    --weights: a class of your own, or a function that returns a module, whose file is run. The model is verified
    against PyTorch before the folder appears; when a check fails, the folder is marked as unverified, servers refuse
    it, and the exit code is 1.
    """
    run_export(ExportFlags(**flags))
