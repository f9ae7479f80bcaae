"""Tokens a second of one stream under every norm, as the context grows.

python -m bench.normalizers fill FOLDER --cache FILE [--context 32768]
python -m bench.normalizers measure FOLDER --cache FILE [--output bench/results/normalizers.json]

FOLDER is a model that was exported with `--norm softmax --max-context 36864`. Only its attention changes from norm to
norm: the attributes of the attention nodes, the heads' parameters of ssa, and where a norm scales queries, nodes that
do, with parameters as at the start of training (projections of the block's input are random).

`fill` reads a text of `--context` tokens, prose of Python's help topics, with the model as it is, and keeps the keys
and values that it computes. `measure` gives them to every model, under the prompt's hashes: `LLM.generate` finds the
prompt in its cache, computes the last token and then what is measured. So all models read the same cache; under another
norm, deeper layers would have computed somewhat other keys. Tokens a second are those after the first of a completion.
Rounds go round the norms, and "over_softmax" is the median over rounds of a norm's speed by that of softmax in the same
round.
"""

import os
import pydoc_data.topics
import statistics
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from bench.interleaving import pause
from bench.result_file import header, write
from sharp import LLM, SamplingParams
from sharp.core.cli import SharpCommand
from sharp.core.manifest import read_manifest
from sharp.serving.config import BackendConfig, EngineConfig
from sharp.serving.engine.block_manager import BlockHashes, first_hash

MARGIN = 256  # the most tokens of a completion
# Attributes of the attention nodes under each norm; b and n of ssa as at the start of training.
NORMS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "adaptive-temperature": {"normalizer": "adaptive_softmax"},
    "ssmax": {},
    "assmax": {},
    "entmax": {"normalizer": "entmax", "alpha": 1.5},
    "sparsemax": {"normalizer": "entmax", "alpha": 2.0},
    "sentmax": {"normalizer": "entmax", "alpha": 1.5},
    "asentmax": {"normalizer": "entmax", "alpha": 1.5},
    "ssa": {"normalizer": "ssa"},
    "sigmoid": {"normalizer": "sigmoid"},
    "relu": {"normalizer": "relu"},
    "relu2": {"normalizer": "relu2"},
    "softpick": {"normalizer": "softpick"},
}
SSA = (1.0, 1.5)
# How a norm scales the query at position i, with L = ln(i + 2): by L, or by 1 + beta L^gamma, where beta and gamma
# depend on the token or the head (`sharp.models.query_scale`).
SCALES = {"ssmax": "length", "assmax": "token", "sentmax": "head", "asentmax": "token"}


def under(folder: Path, norm: str, output: Path) -> Path:
    """Write the model of a folder under another norm of `NORMS` to the new folder `output`, and return `output`.

    All files but model and manifest are hard links, so both folders are on one file system. The manifest has no
    checksums.
    """
    manifest = read_manifest(folder)
    model = onnx.load(folder / manifest.model_file, load_external_data=False)
    attention = [node for node in model.graph.node if node.op_type == "PagedAttention"]
    for node in attention:
        for attribute in node.attribute:
            if attribute.name in NORMS[norm]:
                attribute.CopyFrom(helper.make_attribute(attribute.name, NORMS[norm][attribute.name]))
    if norm == "ssa":
        heads = np.tile(np.array(SSA, np.float32), (manifest.q_heads, 1))
        model.graph.initializer.append(numpy_helper.from_array(heads, "ssa_heads"))
        for node in attention:
            node.input[9] = "ssa_heads"
    if norm in SCALES:
        scale_queries(model, attention, SCALES[norm], manifest.q_heads)
    output.mkdir()
    for file in folder.iterdir():
        if file.name != manifest.model_file:
            os.link(file, output / file.name)
    onnx.save(model, output / manifest.model_file)
    manifest_file = output / "sharp.json"
    manifest_file.unlink()  # a link to the manifest of `folder`, whose checksums are for the graph there
    manifest.model_copy(update={"files": {}}).write(output)
    return output


def scale_queries(model: onnx.ModelProto, attention: list[onnx.NodeProto], kind: str, heads: int) -> None:
    """Multiply every query [tokens, heads, channels] of the `attention` nodes by its heads' scale, in place.

    `kind` is one of the values of `SCALES`, `heads` the number of query heads.
    """
    graph, made = model.graph, {output: node for node in model.graph.node for output in node.output}
    random = np.random.default_rng(0)

    def constant(name: str, value: Any, dtype: Any = np.float32) -> str:
        """Add an initializer called `name` to the graph, and return the name."""
        graph.initializer.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def add(op: str, *inputs: str, **attributes: Any) -> str:
        """Append a node with one output and return the output's name."""
        nodes.append(helper.make_node(op, list(inputs), [f"query_scale_{len(nodes)}"], **attributes))
        return nodes[-1].output[0]

    nodes: list[onnx.NodeProto] = []
    offset, one, two = constant("offset", 2), constant("one", 1), constant("two", 2)
    batch, last, channels = (constant(f"axis_{axis}", [axis], np.int64) for axis in range(3))
    halves = constant("halves", [heads, heads], np.int64)
    whole = add("Cast", "positions", to=onnx.TensorProto.FLOAT)
    length = add("Unsqueeze", add("Log", add("Add", whole, offset)), last)  # [tokens, 1]
    for node in graph.node:
        if node in attention:
            query = node.input[0]
            if kind == "length":
                factor = length
            else:
                if kind == "token":
                    product = query
                    while not made[product].op_type.startswith("MatMul"):
                        product = made[product].input[0]
                    hidden = made[product].input[0]  # [1, tokens, channels]
                    weights = constant(f"{query}_w", random.normal(0, 0.01, (channels_of(model, hidden), 2 * heads)))
                    raw = add("Squeeze", add("MatMul", hidden, weights), batch)
                else:
                    raw = constant(f"{query}_raw", np.zeros((1, 2 * heads)))
                beta, gamma = f"{query}_beta", f"{query}_gamma"
                nodes.append(helper.make_node("Split", [raw, halves], [beta, gamma], axis=1))
                power = add("Pow", length, add("Mul", add("Tanh", gamma), two))
                factor = add("Add", add("Mul", add("Softplus", beta), power), one)
            node.input[0] = add("Mul", query, add("Unsqueeze", factor, channels))
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def channels_of(model: onnx.ModelProto, hidden: str) -> int:
    """Return the number of channels of the output `hidden` of a normalization, from its weight."""
    (node,) = (node for node in model.graph.node if hidden in node.output)
    (weight,) = (tensor for tensor in model.graph.initializer if tensor.name == node.input[1])
    return int(weight.dims[0])


def prompt_of(llm: LLM, length: int) -> list[int]:
    """Return the first `length` tokens of the prose of Python's help topics, repeated if it is shorter."""
    text = "\n".join(pydoc_data.topics.topics.values())
    assert llm.model.tokenizer is not None
    tokens = llm.model.tokenizer.encode(text)
    return (tokens * (length // len(tokens) + 1))[:length]


def load(folder: Path, context: int, threads: int) -> LLM:
    """Return a model with a cache for one stream of `context` tokens and a completion of up to 256."""
    # Without speculative decoding, because under some norms the model repeats itself more than under others.
    engine = EngineConfig(attention_interval=0, max_sequences=1, cache_tokens=context + MARGIN, speculative_tokens=0)
    return LLM(folder, engine=engine, backend=BackendConfig(threads=threads))


def caches(llm: LLM) -> list[NDArray[Any]]:
    """Return the memory of the model's cache tensors, one array per tensor [blocks, ...]; the arrays are no copies."""
    return [value.numpy() for value in llm._engine._backend._current]


def share(llm: LLM, values: list[Any]) -> None:
    """Let a model use cache tensors `values` of another model of the same shapes, in place of its own."""
    backend = llm._engine._backend
    backend._current = backend._next = values
    backend._bind_caches()


def announce(llm: LLM, prompt: list[int]) -> None:
    """Tell the prefix cache that its first blocks hold the prompt, whose keys and values `share` has put there."""
    blocks = llm._engine.blocks
    chain = BlockHashes(first_hash(llm.model.manifest, ""), blocks.block_size)
    blocks.grow(-1, len(prompt))
    blocks.register(-1, 0, chain.up_to(prompt, len(prompt)))
    blocks.release(-1)


@click.group()
def main() -> None:
    """Measure the tokens per second of one stream under every norm."""


@main.command(cls=SharpCommand)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--cache", type=click.Path(path_type=Path), required=True, help="File to write.")
@click.option("--context", default=32768, show_default=True, help="Tokens to read.")
@click.option("--threads", default=2, show_default=True, help="Threads of the model.")
def fill(folder: Path, cache: Path, context: int, threads: int) -> None:
    """Read a text of `context` tokens with the model FOLDER, and keep its cache in a file for `measure`."""
    llm = load(folder, context, threads)
    (completion,) = llm.generate(prompt_of(llm, context), SamplingParams(max_tokens=1))
    click.echo(f"{context} tokens in {completion.timing.total:.0f} s")
    blocks = context // llm.model.manifest.cache.block_size
    np.savez(cache, *[array[:blocks] for array in caches(llm)])


@main.command(cls=SharpCommand)
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--cache", type=click.Path(path_type=Path), required=True, help="What `fill` wrote.")
@click.option("--contexts", default="4096,32768", show_default=True, help="Tokens before the completion.")
@click.option("--rounds", default=9, show_default=True, help="Completions of every model at every context.")
@click.option("--tokens", default=32, show_default=True, help="Tokens of a completion.")
@click.option("--threads", default=2, show_default=True, help="Threads of the model.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file to write.")
def measure(
    folder: Path, cache: Path, contexts: str, rounds: int, tokens: int, threads: int, output: Path | None
) -> None:
    """Measure the decode speed of the model FOLDER under every norm at every context, from a cache that `fill` kept."""
    sizes = [int(size) for size in contexts.split(",")]
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        models = {norm: load(under(folder, norm, Path(work) / norm), max(sizes), threads) for norm in NORMS}
    first = models["softmax"]
    with np.load(cache) as kept:
        for array, name in zip(caches(first), kept.files, strict=True):
            blocks = min(len(array), len(kept[name]))
            array[:blocks] = kept[name][:blocks]
    for llm in models.values():
        share(llm, first._engine._backend._current)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    rows = []
    for size in sizes:
        prompt = prompt_of(first, size)
        for llm in models.values():
            announce(llm, prompt)
        speeds: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(rounds + 1):  # the first round is not counted
            for name, llm in models.items():
                pause()
                (completion,) = llm.generate(prompt, params)
                assert completion.usage.cached_tokens >= size - llm.model.manifest.cache.block_size
                seconds = completion.timing.total - (completion.timing.time_to_first_token or 0)
                speeds[name].append((tokens - 1) / seconds)
        for name, found in speeds.items():
            over = [mine / base for mine, base in zip(found, speeds["softmax"], strict=True)][1:]
            rows.append(
                {
                    "norm": name,
                    "context": size,
                    "tokens_per_second": round(statistics.median(found[1:]), 2),
                    "over_softmax": round(statistics.median(over), 3),
                }
            )
            click.echo(rows[-1])
    result = {
        **header("normalizers"),
        "model": first.model.manifest.source.name,
        "weights": first.model.manifest.quantization or first.model.manifest.dtype,
        "cache": first.model.manifest.cache.dtype,
        "threads": threads,
        "rounds": rounds,
        "rows": rows,
    }
    write(output, result)


if __name__ == "__main__":
    main()
