"""`sharp adapt`: quality of the student, its speed beside the teacher's, and the memory of its attention.

python -m bench.adapt quality MODEL --norm entmax --tokens 60000 --output bench/results/adapt_entmax.json
python -m bench.adapt walk MODEL --norm entmax --steps 100 --output bench/results/adapt_walk_entmax.json
python -m bench.adapt temperature MODEL --output bench/results/adapt_temperature.json
python -m bench.adapt decode MODEL STUDENT --output bench/results/adapt_decode.json
python -m bench.adapt memory --output bench/results/adapt_memory.json
"""

import json
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from bench.result_file import header, write

PACKAGES = ("sharp-attention", "torch", "transformers", "peft")
GREEDY_TOKENS = 64
LENGTH = 256
MEMORY_SUBJECTS = ("sdpa", "softmax", "entmax", "ssa", "adaptive-temperature")


@click.group()
def main() -> None:
    """Measure the students that `sharp adapt` makes: quality, decode speed, memory; one subcommand each."""


@main.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--norm", default="entmax", show_default=True)
@click.option("--tokens", default=60_000, show_default=True)
@click.option("--held-out", type=click.Path(path_type=Path))
@click.option("--folder", type=click.Path(path_type=Path), help="Keep the student here; a killed run goes on.")
@click.option("--output", "out", type=click.Path(path_type=Path))
def quality(model: Path, norm: str, tokens: int, held_out: Path | None, folder: Path | None, out: Path | None) -> None:
    """Adapt MODEL to a norm by `sharp adapt`, and write its report as a benchmark result."""
    from sharp.exporter.adapt.adapt import adapt
    from sharp.exporter.adapt.settings import AdaptSettings

    with tempfile.TemporaryDirectory() as temporary:
        student = folder or Path(temporary) / "student"
        report = adapt(model, AdaptSettings(norm=norm, tokens=tokens, held_out=held_out), student)
    result = {**header("adapt", PACKAGES), **(report or {})}
    write(out, result)
    print(json.dumps({name: result[name] for name in ("norm", "recipe", "seconds")}, indent=2))


@main.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--norm", type=click.Choice(["entmax", "ssa"]), default="entmax")
@click.option("--steps", default=100, show_default=True)
@click.option("--output", "out", type=click.Path(path_type=Path))
def walk(model: Path, norm: str, steps: int, out: Path | None) -> None:
    """Train MODEL twice from the same start: with the norm from the first step, and on a path to it from softmax."""
    from sharp.core.licence import licence
    from sharp.exporter.adapt.figures import token_losses, windows_of
    from sharp.exporter.adapt.recipe import Recipe
    from sharp.exporter.adapt.student import make_student
    from sharp.exporter.adapt.text import encode, read_text
    from sharp.exporter.adapt.training import Progress, train
    from sharp.exporter.sources.norm_options import NO_OPTIONS
    from sharp.exporter.verification.perplexity import perplexity

    rows = []
    for path in ("jump", "walk"):
        student = make_student(model, norm, NO_OPTIONS, 16, None, LENGTH, 0)
        vocabulary, tokenizer = student.decoder.config.vocab_size, student.opened.tokenizer
        text = read_text((), tokenizer, vocabulary, LENGTH + 1, "another MODEL")
        unlike = encode(licence().read_text(encoding="utf-8"), tokenizer, vocabulary, "licence")

        def after(progress: Progress, student: Any = student, path: str = path) -> None:
            """Move an SSA student on towards its norm after each training step, if `path` is "walk"."""
            if path == "walk" and norm == "ssa":
                walk_on(student, (progress.step + 1) / progress.steps)

        after(Progress(-1, steps, 0.0, 0.0, 0.0))
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            recipe = Recipe(steps, LENGTH, 1, path=path == "walk")
            train(student, text.train, recipe, Path(folder), "walk", after)
        seconds = round(time.monotonic() - began, 1)
        found = {
            name: perplexity(token_losses(student, windows_of(tokens, LENGTH)))
            for name, tokens in (("held_out", text.held_out), ("unlike", unlike))
        }
        rows.append({"path": path, **found, "seconds": seconds})
        print(rows[-1], flush=True)
    write(out, {**header("adapt_walk", PACKAGES), "model": model.name, "norm": norm, "steps": steps, "rows": rows})


def walk_on(student: Any, share: float) -> None:
    """Set SSA's parameters of `student`, in place, to this share (0 to 1) of the run.

    In the first half of the run n falls from 16 to 2, and b is 2 / n. Afterwards nothing is set.
    """
    from sharp.models.adapted_model import attention_norms

    if (way := min(1.0, 2 * share)) < 1:
        n = 16 ** (1 - way) * 2**way
        for attention_norm in attention_norms(student.model):
            attention_norm.head_parameters.fill(2 / n, n)


@main.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--length", default=1024, show_default=True)
@click.option("--output", "out", type=click.Path(path_type=Path))
def temperature(model: Path, length: int, out: Path | None) -> None:
    """Measure the perplexity by position of MODEL, not trained, with each polynomial of adaptive temperature.

    Each is measured with the model's own logits, and with logits divided by the polynomial's usual factor.
    """
    from dataclasses import replace

    from sharp.core.licence import licence
    from sharp.exporter.adapt.figures import along_context
    from sharp.exporter.adapt.student import make_student
    from sharp.exporter.adapt.text import encode
    from sharp.exporter.sources.norm_options import NO_OPTIONS
    from sharp.models.adapted_model import attention_norms
    from sharp.plugins.op.attributes import TEMPERATURE_PRESETS

    student = make_student(model, "adaptive-temperature", NO_OPTIONS, 1, None, LENGTH, 0)
    opened = student.opened
    content = licence().read_text(encoding="utf-8")
    text = encode(content, opened.tokenizer, student.decoder.config.vocab_size, "licence")
    norms = attention_norms(student.model)
    starts = [norm.log_scale.detach().clone() for norm in norms if norm.log_scale is not None]
    rows: list[dict[str, Any]] = []

    def measure(**subject: Any) -> None:
        """Measure the perplexity along the context and print it as a row with the fields `subject`."""
        rows.append({**subject, "by_position": along_context(student, text, length, length)})
        print(rows[-1], flush=True)

    with student.teacher():
        measure(polynomial="softmax", divided=False)
    for divided in (True, False):
        for norm, start in zip(norms, starts, strict=True):
            assert norm.log_scale is not None
            norm.log_scale.data.copy_(start * divided)
        for name in ("icml2025", "icml2025-long"):
            for norm in norms:
                norm.described = replace(student.described, temperature_coefficients=TEMPERATURE_PRESETS[name])
            measure(polynomial=name, divided=divided)
    write(out, {**header("adapt_temperature", PACKAGES), "model": model.name, "rows": rows})


@main.command()
@click.argument("teacher", type=click.Path(path_type=Path))
@click.argument("student", type=click.Path(path_type=Path))
@click.option("--contexts", default="4096,32768", show_default=True)
@click.option("--passes", default=5, show_default=True)
@click.option("--quantize", type=click.Choice(["int8", "int4"]), help="The weights of both.")
@click.option("--output", "out", type=click.Path(path_type=Path))
def decode(teacher: Path, student: Path, contexts: str, passes: int, quantize: str | None, out: Path | None) -> None:
    """Measure milliseconds per token of TEACHER and STUDENT, exported and interleaved, after texts of each length.

    The first greedy tokens are compared with those of PyTorch's student where weights are float32.
    """
    from sharp import LLM
    from sharp.exporter.adapt.speed import export_both, latencies, room

    lengths = [int(length) for length in contexts.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        options = () if quantize is None else ("--quantize", quantize)
        export_both(teacher, student, room(max(lengths)), folder, lambda: None, options)
        equal = None if quantize else equal_tokens(LLM(folder / "student"), student)
        if equal is not None:
            print(f"{equal} of {GREEDY_TOKENS} greedy tokens as PyTorch's student", flush=True)
        rows = latencies(folder, lengths, passes)
    for row in rows:
        print(row)
    names = {"teacher": teacher.name, "student": student.name, "weights": quantize or "float32"}
    write(
        out, {**header("adapt_decode", PACKAGES), **names, "greedy_tokens_equal": equal, "passes": passes, "rows": rows}
    )


def equal_tokens(model: Any, student: Path) -> int:
    """Return how many greedy tokens of `model`, an `LLM`, equal those of transformers before the first that differs.

    Both complete a text of up to 200 tokens by 64; `student` is the Hugging Face folder.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import sharp.models.hugging_face  # noqa: F401
    from sharp import SamplingParams

    text = AutoTokenizer.from_pretrained(student)(documentation()).input_ids[:200]
    settings = SamplingParams(temperature=0, max_tokens=GREEDY_TOKENS, ignore_eos=True)
    [completion] = model.generate([text], settings)
    reference = AutoModelForCausalLM.from_pretrained(student)
    with torch.no_grad():
        ids = torch.tensor([text])
        tokens = reference.generate(ids, max_new_tokens=GREEDY_TOKENS, min_new_tokens=GREEDY_TOKENS, do_sample=False)
    expected = tokens[0, len(text) :].tolist()
    found = list(completion.token_ids)
    return next((at for at, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b), len(found))


def documentation() -> str:
    """Return the first 4,000 characters of Python's own documentation, on which `sharp adapt` trains."""
    from pydoc_data.topics import topics

    return "\n".join(topics.values())[:4000]


@main.command()
@click.option("--tokens", default=8192, show_default=True)
@click.option("--output", "out", type=click.Path(path_type=Path))
def memory(tokens: int, out: Path | None) -> None:
    """Measure the peak memory of one layer's attention, forward and backward, for each attention function.

    The layer has 9 query and 3 KV heads of 64 channels, in float32.
    """
    rows = []
    for subject in MEMORY_SUBJECTS:
        # Every subject has a process of its own, because the peak of a process never falls.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append({"subject": subject, "tokens": tokens, **pool.apply(measure, (subject, tokens))})
        print(rows[-1])
    write(out, {**header("adapt_memory", PACKAGES), "rows": rows})


def measure(subject: str, tokens: int) -> dict[str, Any]:
    """Return, as the entry mib, by how much the peak memory of this process grew in a forward and backward pass.

    `subject` is one of `MEMORY_SUBJECTS`: sdpa for torch's attention, otherwise a norm. The process must be a new one.
    """
    import torch

    from sharp.models.normalized_attention import normalized_attention

    def one(heads: int, length: int) -> torch.Tensor:
        """Return random queries, keys or values [1, heads, length, 64]."""
        return torch.randn(1, heads, length, 64, requires_grad=True)

    params = torch.tensor([[1.0, 2.0]] * 9, requires_grad=True) if subject == "ssa" else None

    def run(length: int) -> None:
        """Compute attention over `length` tokens, forward and backward."""
        query, key, value = one(9, length), one(3, length), one(3, length)
        if subject == "sdpa":
            attend = torch.nn.functional.scaled_dot_product_attention
            output = attend(query, key, value, is_causal=True, enable_gqa=True)
        else:
            output = normalized_attention(query, key, value, norm=subject, head_params=params, causal=True)
        output.square().sum().backward()

    run(64)  # loads the libraries
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(tokens)
    return {"mib": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, 1)}


if __name__ == "__main__":
    main()
