"""What `sharp-export` prints besides its progress."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from sharp.exporter.checkpoints.decoder import Decoder
from sharp.exporter.checkpoints.source import Source
from sharp.exporter.export import Export
from sharp.exporter.plan import Plan
from sharp.exporter.verification.comparison import WIDENED, Comparison
from sharp.exporter.verification.greedy_decoding import Continuation
from sharp.exporter.verification.perplexity import Perplexity
from sharp.exporter.verification.verifier import ROUNDING_FACTOR
from sharp.plugins.manifest import HeadNorm
from sharp.plugins.temperature_range import short_of_context

PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}  # for paths and lists
COLUMNS = {"kernels": "Sharp's kernels", "inlined": "standard ops"}  # of the runtimes


def untrained_warning(source: Source) -> Panel:
    """The warning that a user cannot miss: this checkpoint has never seen this norm."""
    config = source.model.config
    scheme = config.scheme
    norm = source.model.norm_name if isinstance(source.model, Decoder) else config.norm
    learned = (
        " The norm's own parameters are not learned." if scheme.head_parameters or scheme.scale_kind != "none" else ""
    )
    cost = "Its output will be worse until it is fine-tuned with this norm."
    if not source.reads_text:
        cost += "\nHow much worse is not measured: it reads no text (it is no decoder, or has no tokenizer)."
    return Panel(
        f"{source.name} was not trained with --norm {norm}.{learned}\n{cost}",
        title="WARNING: UNTRAINED NORM",
        border_style="bold red",
        style="bold",
        expand=False,
    )


def unused_warning(source: Source) -> str:
    """What is said of weights that are in the checkpoint and not in the model."""
    first, more = source.unused_weights[:3], len(source.unused_weights) - 3
    return (
        f"{source.name} has weights that a {source.architecture} does not use, and that are left out: "
        f"{', '.join(first)}{f' and {more} more' if more > 0 else ''}"
    )


def report(result: Export) -> None:
    """Print what was compared, and how to serve the model."""
    console = Console()
    for parameter in result.manifest.norm.parameters:
        where = {"checkpoint": "from the checkpoint", "option": "from the command line", "default": "its start value"}
        value = "learned in every head" if parameter.value is None else parameter.value
        console.print(f"{result.manifest.norm.name}: {parameter.name} {value} ({where[parameter.origin]})", **PLAIN)
    for line in mapped_heads(result.manifest.norm.heads):
        console.print(line, **PLAIN)
    if (short := short_of_context(result.manifest)) is not None:
        console.print(short, **PLAIN)
    print_verification(console, result)
    facts = result.manifest
    size = sum(file.stat().st_size for file in result.folder.iterdir()) / 1e6
    console.print(
        f"{result.folder}: {facts.source.architecture}, norm {facts.norm.name}, {facts.layers} layers, "
        f"{facts.q_heads} query / {facts.kv_heads} KV heads, {size:.0f} MB, opset {facts.opset}",
        **PLAIN,
    )
    if not facts.verified:
        console.print("UNVERIFIED: a check failed", **PLAIN)
    elif facts.dtype == "bfloat16":
        console.print("Build an engine of it with sharp build; a CPU cannot serve it", **PLAIN)
    elif facts.cache.form == "paged":
        console.print(f"Serve it with: sharp-serve {result.folder}", **PLAIN)
    else:
        console.print(f"Inputs: {ports({port.name: port.shape for port in facts.inputs})}", **PLAIN)


def mapped_heads(heads: Sequence[HeadNorm]) -> list[str]:
    """A line for each part of a norm map: which heads of which layer have which norm, with which parameters."""
    lines: list[str] = []
    for one in heads:
        set_up = [f"{parameter.name} {parameter.value}" for parameter in one.parameters if parameter.value is not None]
        lines.append(f"layer {one.layer}, heads {', '.join(map(str, one.heads))}: {', '.join((one.name, *set_up))}")
    return lines


def print_verification(console: Console, result: Export) -> None:
    """The table of the cases, and a line for every other check."""
    found = result.verification
    table = Table(title="Largest difference from PyTorch: logits (relative), entropy (nats)", title_justify="left")
    table.add_column("case")
    names = list(dict.fromkeys(one.runtime for one in found.comparisons))
    for name in ("rows", *map(column, names), "same argmax"):
        table.add_column(name, justify="right")
    runtimes = [[one for one in found.comparisons if one.runtime == name] for name in names]
    for case in zip(*runtimes, strict=True):
        same = min(one.same_greedy for one in case)
        table.add_row(case[0].case, str(case[0].rows), *map(_errors, case), f"{same}/{case[0].rows}")
    console.print(table)
    if any(one.rounding is not None for one in found.comparisons):
        console.print(
            "* against PyTorch in float64: this model amplifies rounding, so it may differ by "
            f"{ROUNDING_FACTOR} times what PyTorch in float32 does",
            **PLAIN,
        )
    if any(one.runtime.endswith(WIDENED) for one in found.comparisons):
        console.print(
            "Computed in float32 with the weights rounded to bfloat16: no runtime of a CPU computes in bfloat16",
            **PLAIN,
        )
    heads = max(
        ((one.heads.error.max(), one.heads.error) for one in found.comparisons), key=lambda pair: float(pair[0])
    )[1]
    layer, head = np.unravel_index(heads.argmax(), heads.shape)
    console.print(
        f"Largest difference of a head's entropy: {heads.max():.1e} nats, layer {layer}, head {head}", **PLAIN
    )
    if found.continuations:
        said = [f"{one.same} with {column(one.runtime)}{_ties(one)}" for one in found.continuations]
        tokens = found.continuations[0].tokens
        console.print(f"Greedy tokens of {tokens} that are PyTorch's: {', '.join(said)}", **PLAIN)
    if (measured := result.perplexity) is not None:
        written = [
            f"{one.perplexity:.3f} with {column(one.runtime)} ({one.reference_perplexity:.3f} "
            f"{'in PyTorch' if one.reference == 'PyTorch' else f'with {column(one.reference)}'}, {one.tokens} tokens)"
            for one in found.predictions
        ]
        console.print(f"Perplexity of {measured.text}, {measured.tokens} tokens: {perplexity_line(measured)}", **PLAIN)
        console.print(f"  of the written model: {', '.join(written)}", **PLAIN)


def column(runtime: str) -> str:
    """What a runtime is called in tables."""
    kind, _, quantization = runtime.partition(" ")
    return f"{COLUMNS[kind]} {quantization}".rstrip()


def _errors(one: Comparison) -> str:
    mark = "" if one.rounding is None else "*"
    return f"{one.logits_error:.0e}, {one.entropy_error:.0e}{mark}{'' if one.passed else ' FAILED'}"


def _ties(one: Continuation) -> str:
    return f" ({one.tied} others within the tolerance)" if one.tied else ""


def report_plan(plan: Plan) -> None:
    """Print what an export would do."""
    console = Console()
    trained = "" if plan.trained else ", which the checkpoint was not trained with"
    cache = f"{plan.cache_bytes_per_token / 1e3:,.1f} kB a token, {plan.cache_dtype} in blocks of {plan.block_size}"
    lines = {
        "model": f"{plan.name}: {plan.architecture}, {plan.kind}",
        "shape": f"{plan.layers} layers, {plan.q_heads} query / {plan.kv_heads} KV heads of {plan.head_dim}, "
        f"vocabulary {plan.vocab_size}, context {plan.max_context}",
        "norm": f"{plan.norm}{trained}",
        "graph": f"cache {plan.cache}, target {plan.target}, opset {plan.opset}, "
        f"{len(plan.inputs)} inputs, {len(plan.outputs)} outputs",
        "inputs": ports(plan.inputs),
        "weights": f"{plan.weights:,} numbers, {plan.quantization or plan.dtype}, "
        f"{plan.weight_bytes / 1e6:,.1f} MB on disk",
        "cache": cache if plan.cache_bytes_per_token else "none",
        "memory": f"about {plan.memory_bytes / 1e9:.1f} GB for the export",
    }
    for name, line in lines.items():
        console.print(f"{name:<8} {line}", **PLAIN)
    console.print("Nothing was written (--dry-run).", **PLAIN)


def ports(inputs: Mapping[str, Sequence[str | int]]) -> str:
    """The graph's inputs with their shapes; of the layers' caches the first stands for all."""
    own = [f"{name} {list(shape)}" for name, shape in inputs.items() if ".0." in name or not re.search(r"\.\d", name)]
    own += [f"{name} {list(shape)}" for name, shape in inputs.items() if name.endswith("_cache.0")]
    return ", ".join(own) + (" and so on for every layer" if len(own) < len(inputs) else "")


def perplexity_line(measured: Perplexity) -> str:
    """The numbers, under the norm of the training first."""
    before, after = (
        f"{number:.1f} with {norm}"
        for number, norm in zip((measured.before, measured.after), (measured.trained_norm, measured.norm), strict=True)
    )
    return before if measured.norm == measured.trained_norm else f"{before} (trained), {after}"
