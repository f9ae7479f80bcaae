"""One stream in Sharp and in its peers: decoding speed and time to the first token, interleaved, in one process.

python -m bench.generation --sharp FOLDER [--sharp FOLDER] [--genai FOLDER] [--llama FILE.gguf] [--threads 2]
python -m bench.generation --sharp FOLDER --genai FOLDER --texts --completion-tokens 192

Every runtime reads the same prompt and generates as many tokens greedily, past any end-of-sequence token; rounds go
round the runtimes, so that they share the machine's good and bad minutes, and medians are compared. The prompt has
random tokens, and there is no speculative decoding. With --texts the prompts are requests to a chat model
(`QUESTIONS`), and Sharp proposes draft tokens as by default, because their worth depends on the text.
FOLDER of --genai is one of onnxruntime-genai's own model builder, or a contiguous one of sharp-export. "limit" is
the share of the time that reading the weights once would take, at the memory bandwidth of the same minutes.

The peers' models: `python -m onnxruntime_genai.models.builder -m HF_FOLDER -o OUT -p fp32 -e cpu`, and any GGUF file.
"""

import json
import os
import pydoc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch  # noqa: F401 - before attention.py tells OpenMP's threads to sleep: llama.cpp's would, 4 times slower

from bench.attention import read_bandwidth
from bench.interleaving import pause
from bench.result_file import header, write
from sharp import LLM, SamplingParams
from sharp.core.cli import SharpCommand
from sharp.core.manifest import read_manifest
from sharp.serving.config import BackendConfig, EngineConfig
from sharp.serving.text.chat_template import load_chat_template
from sharp.serving.text.tokenizer import load_tokenizer

# Requests to a chat model, some of which repeat much of the prompt in their completion, so that drafts are accepted.
HELP = pydoc.render_doc(json.dumps, renderer=pydoc.plaintext)[:1500]  # type: ignore[attr-defined]  # typeshed lacks it
CODE = (Path(__file__).parents[1] / "serving" / "text" / "stop_condition.py").read_text()
QUESTIONS = {
    "explain": "Explain how a refrigerator works.",
    "story": "Write a short story about a lighthouse keeper.",
    "list": "List ten facts about the planet Mars.",
    "code": "Write a Python function that parses a CSV line with quotes, and explain it.",
    "summary": f"Summarize this text:\n\n{HELP}",
    "edit": f"Rewrite this Python file with longer variable names, and print the whole file:\n\n{CODE}",
    "extract": f"Copy the sentences about parameters from this text, word by word:\n\n{HELP}",
}
PACKAGES = ("sharp-attention", "onnxruntime", "onnxruntime-genai", "llama-cpp-python", "numpy")


@dataclass(frozen=True)
class GenerationSpeed:
    """Seconds to the first token, and tokens a second after it."""

    first_token: float
    decode: float


# (prompt, new tokens) -> GenerationSpeed
Runtime = Callable[[list[int], int], GenerationSpeed]


def run_of(stamps: list[float], began: float) -> GenerationSpeed:
    """Return the speed of a run from the times of its tokens, at least two, in seconds of `time.perf_counter`.

    `began` is the time at which the run began.
    """
    return GenerationSpeed(stamps[0] - began, (len(stamps) - 1) / (stamps[-1] - stamps[0]))


def sharp(folder: Path, threads: int, context: int, speculative_tokens: int | None) -> Runtime:
    """Return a runtime that is Sharp's engine in this process, over an exported folder.

    `context` is the most tokens of prompt and completion; `speculative_tokens` is that of `EngineConfig`.
    """
    engine = EngineConfig(
        attention_interval=0,
        prefix_cache=False,
        cache_tokens=context,
        prefill_chunk_tokens=2048,
        max_sequences=1,
        speculative_tokens=speculative_tokens,
    )
    llm = LLM(folder, backend=BackendConfig(threads=threads), engine=engine)

    def run(prompt: list[int], count: int) -> GenerationSpeed:
        """Generate `count` tokens greedily after a prompt of token ids, and return the speed."""
        timing = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))[0].timing
        first = timing.time_to_first_token or 0.0
        return GenerationSpeed(first, (count - 1) / (timing.total - first))

    return run


def genai(folder: Path, threads: int, _context: int) -> Runtime:
    """Return a runtime of onnxruntime-genai, which must be installed; a folder of Sharp's gets Sharp's library."""
    import onnxruntime_genai

    from sharp.exporter.forms.contiguous.genai import with_kernels
    from sharp.plugins import library_path

    config = onnxruntime_genai.Config(str(folder))
    if (folder / "sharp.json").exists():
        config.overlay(with_kernels(library_path("onnxruntime")))
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    model = onnxruntime_genai.Model(config)

    def run(prompt: list[int], count: int) -> GenerationSpeed:
        """Generate `count` tokens greedily after a prompt of token ids, and return the speed."""
        options = onnxruntime_genai.GeneratorParams(model)
        length = len(prompt) + count
        options.set_search_options(max_length=length, min_length=length, do_sample=False)
        generator = onnxruntime_genai.Generator(model, options)
        began = time.perf_counter()
        generator.append_tokens(np.array(prompt, np.int32))
        stamps = []
        for _ in range(count):
            generator.generate_next_token()
            generator.get_next_tokens()
            stamps.append(time.perf_counter())
        return run_of(stamps, began)

    return run


def llama(file: Path, threads: int, context: int) -> Runtime:
    """Return a runtime of llama.cpp (the package llama-cpp-python) over a GGUF file."""
    import llama_cpp

    model = llama_cpp.Llama(
        str(file), n_ctx=context, n_threads=threads, n_threads_batch=threads, n_batch=2048, n_ubatch=512, verbose=False
    )

    def run(prompt: list[int], count: int) -> GenerationSpeed:
        """Generate `count` tokens greedily after a prompt of token ids, and return the speed."""
        model.reset()
        began, stamps = time.perf_counter(), []
        for _ in islice(model.generate(prompt, temp=0.0), count):
            stamps.append(time.perf_counter())
        return run_of(stamps, began)

    return run


def prompts_of(folder: Path) -> dict[str, list[int]]:
    """Return the tokens of the prompt of every question, by its name, for the chat model in an exported folder.

    The folder must have a tokenizer and a chat template.
    """
    manifest = read_manifest(folder)
    tokenizer, template = load_tokenizer(folder, manifest), load_chat_template(folder)
    assert tokenizer is not None and template is not None, f"{folder} has no chat template"
    return {
        name: tokenizer.encode(template.render([{"role": "user", "content": question}]), special_tokens=False)
        for name, question in QUESTIONS.items()
    }


def weight_bytes(path: Path) -> int:
    """Return the bytes of the weights: of a file, or of the .onnx and .data files in a folder."""
    files = [path] if path.is_file() else [*path.glob("*.onnx"), *path.glob("*.data")]
    return sum(file.stat().st_size for file in files)


@click.command(cls=SharpCommand)
@click.option("--sharp", "sharps", type=click.Path(path_type=Path), multiple=True, required=True)
@click.option("--genai", "genais", type=click.Path(path_type=Path), multiple=True)
@click.option("--llama", "llamas", type=click.Path(path_type=Path), multiple=True)
@click.option("--threads", default=len(os.sched_getaffinity(0)), show_default=True)
@click.option("--prompt-tokens", default=261, show_default=True, help="Length of the random prompt.")
@click.option("--texts", is_flag=True, help="Requests to a chat model instead of random tokens.")
@click.option(
    "--completion-tokens",
    "--answer-tokens",
    "completion_tokens",
    default=64,
    show_default=True,
    help="Tokens of a completion.",
)
@click.option("--rounds", default=5, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write.")
def main(
    sharps: tuple[Path, ...],
    genais: tuple[Path, ...],
    llamas: tuple[Path, ...],
    threads: int,
    prompt_tokens: int,
    texts: bool,
    completion_tokens: int,
    rounds: int,
    output: Path | None,
) -> None:
    """Measure every runtime and compare it with the first."""
    random = {"random": np.random.default_rng(0).integers(100, 10_000, prompt_tokens).tolist()}
    prompts = prompts_of(sharps[0]) if texts else random
    context = -(-(max(map(len, prompts.values())) + completion_tokens + 1) // 64) * 64
    subjects: list[tuple[str, Path, Runtime]] = [
        *((f"sharp {path.name}", path, sharp(path, threads, context, None if texts else 0)) for path in sharps),
        *((f"genai {path.name}", path, genai(path, threads, context)) for path in genais),
        *((f"llama.cpp {path.name}", path, llama(path, threads, context)) for path in llamas),
    ]
    read, reads = read_bandwidth(threads, time.perf_counter), []
    runs: dict[tuple[str, str], list[GenerationSpeed]] = {
        (name, prompt): [] for name, _, _ in subjects for prompt in prompts
    }
    for _, _, run in subjects:
        run(next(iter(prompts.values())), 4)
    for _ in range(rounds):
        for prompt, tokens in prompts.items():
            for name, _, run in subjects:
                pause()
                runs[name, prompt].append(run(tokens, completion_tokens))
            pause()
            reads.append(read())
    bandwidth = statistics.median(reads)
    rows: list[dict[str, Any]] = []
    for name, path, _ in subjects:
        decodes = {prompt: statistics.median(timed.decode for timed in runs[name, prompt]) for prompt in prompts}
        # The harmonic mean is all tokens over all the time, because completions are equally long.
        decode = statistics.harmonic_mean([*decodes.values()])
        first = statistics.fmean(
            statistics.median(timed.first_token for timed in runs[name, prompt]) for prompt in prompts
        )
        rows.append(
            {
                "runtime": name,
                "decode_tokens_per_second": round(decode, 2),
                "decode_of_each": {prompt: round(of_it, 2) for prompt, of_it in decodes.items()},
                "first_token_ms": round(1000 * first, 1),
                "weight_bytes": weight_bytes(path),
                "limit": round(decode * weight_bytes(path) / bandwidth, 3),
            }
        )
    for row in rows:
        row["decode_ratio"] = round(rows[0]["decode_tokens_per_second"] / row["decode_tokens_per_second"], 3)
        row["decode_ratio_of_each"] = {
            prompt: round(rows[0]["decode_of_each"][prompt] / speed, 3)
            for prompt, speed in row["decode_of_each"].items()
        }
        row["first_token_ratio"] = round(rows[0]["first_token_ms"] / row["first_token_ms"], 3)
        click.echo(row)
    result = {
        **header("generation", PACKAGES),
        "threads": threads,
        "prompt_tokens": round(statistics.fmean(map(len, prompts.values()))),
        "completion_tokens": completion_tokens,
        "rounds": rounds,
        "read_bytes_per_second": bandwidth,
        "rows": rows,
    }
    write(output, result)


if __name__ == "__main__":
    main()
