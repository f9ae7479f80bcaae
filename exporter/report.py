"""The report and the warnings that `sharp-export` prints."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.panel import Panel

from sharp.core.manifest import HeadNorm, Manifest
from sharp.core.table import Table
from sharp.core.vocabulary import beyond_sentence
from sharp.exporter.export import Export
from sharp.exporter.plan import ExportPlan
from sharp.exporter.sources.decoder import Decoder
from sharp.exporter.sources.family_sampling import family_sampling
from sharp.exporter.sources.source import Source
from sharp.exporter.verification.comparison import WIDENED, CaseComparison
from sharp.exporter.verification.greedy_decoding import Continuation
from sharp.exporter.verification.perplexity import Perplexity
from sharp.exporter.verification.verifier import ROUNDING_FACTOR
from sharp.plugins.op.temperature_range import short_of_context

PLAIN: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}  # for lines with paths or lists
COLUMNS = {"kernels": "Sharp's kernels", "inlined": "standard ops"}  # runtime -> title of its column


def untrained_warning(source: Source) -> Panel:
    """Return a conspicuous warning that the checkpoint was not trained with the norm of the export."""
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


def unused_warning(source: Source) -> str | None:
    """Return one line that names keys and weights of the checkpoint that the export leaves out; None if none."""
    parts: list[str] = []
    for unused in source.unused:
        names = (*unused.unknown, *unused.ignored)
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            parts.append(f"{unused.place}: {', '.join(names[:3])}{more}")
    return f"Not used of {source.name}: {'; '.join(parts)} (report.json has all)" if parts else None


def tokenizer_notes(source: Source) -> list[str]:
    """Return a sentence if the tokenizer is missing, and a sentence if the model lacks tokens of it; else nothing."""
    notes: list[str] = []
    if source.reads_tokens and source.write_tokenizer is None:
        notes.append(
            f"{source.name} has no tokenizer, so it is served by token ids only; --tokenizer FOLDER (or a "
            "tokenizer.json), or --tokenizer bytes where it reads bytes, gives it one"
        )
    if source.tokens_beyond:
        notes.append(f"{source.name}: {beyond_sentence(source.tokens_beyond, source.model.config.vocab_size)}")
    return notes


def report(result: Export) -> None:
    """Print the norm's parameters, the verification, the folder, and how to serve the model, to stdout."""
    console = Console()
    for parameter in result.manifest.norm.parameters:
        where = {"checkpoint": "from the checkpoint", "option": "from the command line", "default": "its start value"}
        value = "learned in every head" if parameter.value is None else parameter.value
        console.print(f"{result.manifest.norm.name}: {parameter.name} {value} ({where[parameter.origin]})", **PLAIN)
    for line in mapped_heads(result.manifest.norm.heads):
        console.print(line, **PLAIN)
    if (short := short_of_context(result.manifest)) is not None:
        console.print(short, **PLAIN)
    if (sampled := sampling_line(result.manifest)) is not None:
        console.print(sampled, **PLAIN)
    print_verification(console, result)
    console.print(result.report["checked_against"], **PLAIN)
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


def sampling_line(facts: Manifest) -> str | None:
    """Return a line with the sampling defaults of a server and their origin; None for models that generate no text."""
    if facts.cache.form != "paged" or facts.tokenizer.file is None:
        return None
    given = facts.sampling.model_dump(exclude_none=True)
    values = ", ".join(f"{name} {value:g}" for name, value in {"temperature": 1.0, **given}.items())
    if "temperature" in given:
        return f"A server samples with {values} ({facts.sampling_source})"
    who = f"{facts.source.name} recommends no temperature"
    if (family := family_sampling(facts.source.name)) is None:
        return f"A server samples with {values}, as {who}; its authors' page may: --sampling temperature=VALUE"
    proposed = " ".join(
        f"--sampling {name}={value:g}" for name, value in family.sampling.model_dump(exclude_none=True).items()
    )
    return f"A server samples with {values}, as {who}. For {family.family}, {family.source} recommends: {proposed}"


def mapped_heads(heads: Sequence[HeadNorm]) -> list[str]:
    """Return a line for each part of a norm map, with its layer, its heads, its norm and the norm's parameters."""
    lines: list[str] = []
    for norm in heads:
        set_up = [f"{parameter.name} {parameter.value}" for parameter in norm.parameters if parameter.value is not None]
        lines.append(f"layer {norm.layer}, heads {', '.join(map(str, norm.heads))}: {', '.join((norm.name, *set_up))}")
    return lines


def print_verification(console: Console, result: Export) -> None:
    """Print the table of the cases, and a line for every other check."""
    found = result.verification
    table = Table(title="Largest difference from PyTorch: logits (relative), entropy (nats)", title_justify="left")
    table.add_column("case")
    names = list(dict.fromkeys(comparison.runtime for comparison in found.comparisons))
    for name in ("rows", *map(column, names), "same argmax"):
        table.add_column(name, justify="right")
    runtimes = [[comparison for comparison in found.comparisons if comparison.runtime == name] for name in names]
    for case in zip(*runtimes, strict=True):
        same = min(comparison.same_greedy for comparison in case)
        table.add_row(case[0].case, str(case[0].rows), *map(_errors, case), f"{same}/{case[0].rows}")
    console.print(table)
    if any(comparison.rounding is not None for comparison in found.comparisons):
        console.print(
            "* against PyTorch in float64: this model amplifies rounding, so it may differ by "
            f"{ROUNDING_FACTOR} times what PyTorch in float32 does",
            **PLAIN,
        )
    if any(comparison.runtime.endswith(WIDENED) for comparison in found.comparisons):
        console.print(
            "Computed in float32 with the weights rounded to bfloat16: no runtime of a CPU computes in bfloat16",
            **PLAIN,
        )
    heads = max(
        ((comparison.heads.error.max(), comparison.heads.error) for comparison in found.comparisons),
        key=lambda pair: float(pair[0]),
    )[1]
    layer, head = np.unravel_index(heads.argmax(), heads.shape)
    console.print(
        f"Largest difference of a head's entropy: {heads.max():.1e} nats, layer {layer}, head {head}", **PLAIN
    )
    if found.continuations:
        said = [
            f"{continuation.same} with {column(continuation.runtime)}{_ties(continuation)}"
            for continuation in found.continuations
        ]
        tokens = found.continuations[0].tokens
        console.print(f"Greedy tokens of {tokens} that are PyTorch's: {', '.join(said)}", **PLAIN)
    if (measured := result.perplexity) is not None:
        written = [
            f"{text.perplexity:.3f} with {column(text.runtime)} ({text.reference_perplexity:.3f} "
            f"{'in PyTorch' if text.reference == 'PyTorch' else f'with {column(text.reference)}'}, "
            f"{text.tokens} tokens)"
            for text in found.predictions
        ]
        console.print(f"Perplexity of {measured.text}, {measured.tokens} tokens: {perplexity_line(measured)}", **PLAIN)
        console.print(f"  of the written model: {', '.join(written)}", **PLAIN)


def column(runtime: str) -> str:
    """Return the title of a runtime's column in tables.

    `runtime` is `kernels` or `inlined`, and may have a quantization or another note behind a space, which is kept.
    """
    kind, _, quantization = runtime.partition(" ")
    return f"{COLUMNS[kind]} {quantization}".rstrip()


def _errors(one: CaseComparison) -> str:
    """Return the table cell of a comparison: errors of logits and entropy (nats), * if PyTorch's rounding counts."""
    mark = "" if one.rounding is None else "*"
    return f"{one.logits_error:.0e}, {one.entropy_error:.0e}{mark}{'' if one.passed else ' FAILED'}"


def _ties(one: Continuation) -> str:
    """Return the words for other tokens within the tolerance of the greedy one; "" if there is none."""
    return f" ({one.tied} others within the tolerance)" if one.tied else ""


def report_plan(plan: ExportPlan) -> None:
    """Print the plan of an export to stdout."""
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
    """Return the graph's inputs with their shapes, in one line that shows the caches of the first layer only."""
    own = [f"{name} {list(shape)}" for name, shape in inputs.items() if ".0." in name or not re.search(r"\.\d", name)]
    own += [f"{name} {list(shape)}" for name, shape in inputs.items() if name.endswith("_cache.0")]
    return ", ".join(own) + (" and so on for every layer" if len(own) < len(inputs) else "")


def perplexity_line(measured: Perplexity) -> str:
    """Return the perplexity under the trained norm and, if it is another, under the exported norm."""
    before, after = (
        f"{number:.1f} with {norm}"
        for number, norm in zip((measured.before, measured.after), (measured.trained_norm, measured.norm), strict=True)
    )
    return before if measured.norm == measured.trained_norm else f"{before} (trained), {after}"
