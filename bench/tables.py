"""The tables of `bench/RESULTS.md` and of the README, made from the files of `bench/results/`.

python -m bench.tables

A file has a section under its benchmark, with date, machine and versions. The archived files are never edited. Where an
older file lacks a field or names a thing in another way, this module knows how to read the file.
"""

import json
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from bench import sections, trust_sections
from bench.sections import Row
from sharp.core.cli import SharpCommand
from sharp.core.errors import InputError

RESULTS = Path(__file__).resolve().parent / "results"
PAGE = RESULTS.with_name("RESULTS.md")
README = RESULTS.parents[1] / "README.md"
README_RESULT = RESULTS / "attention_decode_32k.json"
COLUMNS = 120  # of a line of prose
INTRODUCTION = """# Results

Written by `python -m bench.tables` from the files of `results/`; do not edit. [README.md](README.md) says how to run
each benchmark, [notes](notes/README.md) what was learned. "x peer" is how many times as fast as the peer.
"""
SETTINGS = {  # the settings in a file, and their names on the page
    name: name.replace("_", " ")
    for name in (
        *("model", "parameters", "checkpoint_dtype", "weights", "cache", "heads", "head_dim", "target", "text"),
        *("threads", "clock", "rounds", "streams", "context", "requests", "concurrency", "running", "waiting"),
        *("replicas", "prefixes", "zipf", "prefix_tokens", "own_tokens", "cache_tokens", "tokens_per_second"),
        *("prompt_tokens", "completion_tokens", "completion_seconds", "note"),
    )
}
OLD_NAMES = {  # old names of fields, and today's names
    "answer_tokens": "completion_tokens",
    "answer_seconds": "completion_seconds",
    "answered": "completed",
    "long_prompts_answered": "long_prompts_completed",
}


# Benchmarks in the page's order.
SECTIONS: dict[str, tuple[str, Callable[[Row], Iterator[str]]]] = {
    "attention": ("Attention on a CPU", sections.attention),
    "generation": ("One stream beside its peers", sections.generation),
    "normalizers": ("Tokens per second under every norm", sections.normalizers),
    "precision": ("Quantization", sections.precision),
    "long_prompt": ("Memory of a long prompt", sections.long_prompt),
    "embeddings": ("Embeddings beside sentence-transformers", sections.embeddings),
    "engine_step": ("The engine's share of a step", sections.engine_step),
    "host_share": ("The host's share of a step of an emulated device", sections.host_share),
    "plan": ("`sharp plan` beside measurements", sections.plan),
    "metrics": ("Attention metrics", sections.single_row),
    "overload": ("A server at twice its capacity", sections.single_row),
    "ray_serve": ("Ray Serve", sections.ray_serve),
    "budgets": ("What one request of up to 1 MB costs a server and another client's stream", trust_sections.budgets),
    "faults": ("Faults", trust_sections.faults),
    "fuzz": ("Fuzzing", trust_sections.fuzz),
    "key_screen_calls": ("Calls with a key screen beside float64", trust_sections.key_screen_calls),
    "soak": ("A server under mixed load for long", trust_sections.soak),
    "export_memory": ("Memory of an export", sections.export_memory),
    "adapt": ("Softmax models adapted to another norm", sections.adapt),
    "adapt_decode": ("Decoding of an adapted model", sections.adapt_decode),
    "adapt_walk": ("A path from softmax to the norm beside the norm from the first step", sections.adapt_walk),
    "adapt_temperature": ("Adaptive temperatures without training", sections.adapt_temperature),
    "long_context": ("What is found in long documents", sections.long_context),
    "adapt_memory": ("Memory of normalized_attention's forward and backward pass", sections.adapt_memory),
    "certified": ("Reads for a certified error, where no weight is zero (study)", sections.certified),
    "routing": ("Prefix routing (simulation)", sections.routing),
    "gpu_instructions": ("GPU kernels by their instructions", sections.gpu_instructions),
    "gpu": ("GPU", sections.gpu),
}


def renamed(row: Row) -> Row:
    """Return a row with today's names of its fields."""
    return {OLD_NAMES.get(name, name): value for name, value in row.items()}


def read(path: Path) -> Row:
    """Return the result in a JSON file of bench/results, with the names of older files replaced by today's."""
    result: Row = json.loads(path.read_text(encoding="utf-8"), object_hook=renamed)
    if path.stem == "gpu":
        return {"benchmark": "gpu", "sections": result}
    if path.stem == "gpu_library":
        return {"benchmark": "gpu", "sections": {"compiled libraries": result}}
    result.setdefault("benchmark", path.stem)  # older files
    if "bar" in result:
        result["target_bytes"] = result["bar"]
    if isinstance(result.get("machine"), dict):
        result["machine"] = f"{result['machine']['cpu']}, {result['machine']['cores']} cores"
    elif "cpus" in result:
        result["machine"] = f"{result['machine']}, {result['cpus']} cores"
    if "onnxruntime" in result:
        result["versions"] = {"onnxruntime": result["onnxruntime"]}
    return result


def is_single(value: Any) -> bool:
    """Whether a setting is one number or text."""
    return isinstance(value, str | int | float)


def facts(result: Row) -> str:
    """Return date, machine, versions and settings in one line, those that the result has."""
    said = [str(result[name]) for name in ("date", "machine") if name in result]
    said += [f"{name} {version}" for name, version in result.get("versions", {}).items() if name != "sharp-attention"]
    settings = {**result, **result.get("workload", {})}
    said += [f"{words} {settings[name]}" for name, words in SETTINGS.items() if is_single(settings.get(name))]
    if data := sorted({row["data"] for row in result.get("rows", ()) if "data" in row}):
        said.append(f"data {', '.join(data)}")
    return "; ".join(said)


def page(folder: Path) -> str:
    """Return the whole page, made from the JSON files of a folder.

    Raises:
        InputError: a file is of a benchmark that has no section.
    """
    results = {path.name: read(path) for path in sorted(folder.glob("*.json"))}
    for name, result in results.items():
        if result["benchmark"] not in SECTIONS:
            raise InputError(f"{name} is of benchmark {result['benchmark']!r}; add it to SECTIONS in bench/tables.py")
    lines = [INTRODUCTION]
    for benchmark, (title, section) in SECTIONS.items():
        mine = {name: result for name, result in results.items() if result["benchmark"] == benchmark}
        if mine:
            lines += [f"## {title}", ""]
        for name, result in mine.items():
            lines += [f"### {name}", ""]
            if said := facts(result):
                lines += [said, ""]
            lines += [*section(result), ""]
    return "\n".join(wrapped(line) for line in "\n".join(lines).rstrip().split("\n")) + "\n"


def wrapped(line: str) -> str:
    """Break a line of prose that is too long; a row of a table stays one line."""
    if len(line) <= COLUMNS or line.startswith("|"):
        return line
    return textwrap.fill(line, COLUMNS, break_long_words=False, break_on_hyphens=False)


def with_speed_table(readme: str, result: Row) -> str:
    """Return the README with its speed table, which begins with the line `| | ms |`, made from the result.

    A README without this line is returned as it is.
    """
    before, heading, after = readme.partition("\n| | ms |")
    rest = after.partition("\n\n")[2]
    return f"{before}\n{chr(10).join(sections.decode_in_short(result))}\n\n{rest}" if heading else readme


@click.command(cls=SharpCommand)
def main() -> None:
    """Write bench/RESULTS.md and the speed table of README.md."""
    PAGE.write_text(page(RESULTS), encoding="utf-8")
    README.write_text(with_speed_table(README.read_text(encoding="utf-8"), read(README_RESULT)), encoding="utf-8")
    click.echo(f"{PAGE.name}: written from {len(list(RESULTS.glob('*.json')))} files")


if __name__ == "__main__":
    main()
