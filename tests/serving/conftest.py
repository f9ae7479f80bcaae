"""A tiny ONNX model whose tokens follow from a formula, and fixtures that serve the model."""

import asyncio
import queue
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sharp.core.manifest import Cache, Manifest, Norm, SourceRecord, TokenizerSettings, read_manifest
from sharp.serving.backends import load_backend
from sharp.serving.config import BackendConfig, EngineConfig, MetricsConfig, ServerConfig
from sharp.serving.engine.engine import Engine
from sharp.serving.server.server import Settings, Started, run_server
from tests.serving.grpc_client import Client
from tests.serving.loop_watch import LoopWatch
from tests.serving.running_engine import RunningEngine

VOCAB = 257  # all bytes and an end-of-sequence token
EOS = 256
BLOCK = 4
HEADS = 2
MAX_CONTEXT = 128
# Factors of each head on entropy, support, inverse temperature and logit spread.
HEAD_SCALE = np.array([[1, 1, 1, 1], [0.5, 0.5, 2, 1]], np.float32)


def make_model(hashing: int) -> onnx.ModelProto:
    """Return a model with next token = (last + 1 + hashing * sum of (position + 1) * token) mod VOCAB.

    All tokens are read from the paged cache, in which a value is the token. With `hashing` 0 the model counts. With 1,
    a token in the wrong slot, a stale block or a wrong block table changes the tokens. The statistics are those of
    uniform attention, scaled per head.
    """
    nodes, constants = [], []

    def constant(value, dtype=np.int64) -> str:
        name = f"constant_{len(constants)}"
        constants.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def add(op: str, *inputs: str, output: str | None = None, **attributes) -> str:
        name = output or f"value_{len(nodes)}"
        nodes.append(helper.make_node(op, list(inputs), [name], **attributes))
        return name

    def whole(name: str) -> str:
        return add("Cast", name, to=TensorProto.INT64)

    flat = add("Reshape", "value_cache.0", constant([-1]))
    written = add(
        "ScatterElements", flat, whole("slot_mapping"), add("Cast", "input_ids", to=TensorProto.FLOAT), axis=0
    )
    add("Reshape", written, add("Shape", "value_cache.0"), output="value_cache_out.0")
    add("Identity", "key_cache.0", output="key_cache_out.0")

    ends = add("Slice", whole("query_start"), constant([1]), constant([2**31]))  # [sequences]
    before = add("LessOrEqual", ends, add("Unsqueeze", "logits_indices", constant([1])))  # [outputs, sequences]
    sequence = add("ReduceSum", whole(before), constant([1]), keepdims=0)
    table = add("Max", whole(add("Gather", "block_table", sequence)), constant(0))  # [outputs, max_blocks]
    slots = add("Add", add("Mul", add("Unsqueeze", table, constant([2])), constant(BLOCK)), constant(np.arange(BLOCK)))
    tokens = whole(add("Gather", written, add("Reshape", slots, constant([0, -1]))))  # [outputs, keys]
    key = add("Range", constant(0), add("Gather", add("Shape", tokens), constant(1)), constant(1))
    query = add("Unsqueeze", add("Gather", "positions", "logits_indices"), constant([1]))
    weighted = add("Mul", tokens, add("Mul", whole(add("LessOrEqual", key, query)), add("Add", key, constant(1))))
    total = add("ReduceSum", weighted, constant([1]), keepdims=0)
    last = add("ReduceSum", add("Mul", tokens, whole(add("Equal", key, query))), constant([1]), keepdims=0)
    following = add("Add", add("Add", last, constant(1)), add("Mul", total, constant(hashing)))
    add(
        "OneHot", add("Mod", following, constant(VOCAB)), constant(VOCAB), constant([0, 4], np.float32), output="logits"
    )

    visible = add("Cast", add("Add", "positions", constant(1)), to=TensorProto.FLOAT)
    one = add("Div", visible, visible)
    columns = [add("Unsqueeze", column, constant([0, 2, 3])) for column in (add("Log", visible), visible, one, one)]
    rows = add("Mul", add("Concat", *columns, axis=3), constant(HEAD_SCALE, np.float32))  # [1, tokens, heads, 4]
    add("Mul", rows, add("Cast", "collect_stats", to=TensorProto.FLOAT), output="stats")

    def value(name: str, dtype: int, *shape: str | int) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, dtype, shape)

    caches = [("key_cache", ("blocks", 1, 1, BLOCK)), ("value_cache", ("blocks", 1, BLOCK, 1))]
    inputs = [
        value("input_ids", TensorProto.INT64, "tokens"),
        value("positions", TensorProto.INT64, "tokens"),
        value("slot_mapping", TensorProto.INT32, "tokens"),
        value("block_table", TensorProto.INT32, "sequences", "max_blocks"),
        value("query_start", TensorProto.INT32, "sequences_and_one"),
        value("context_lens", TensorProto.INT32, "sequences"),
        value("collect_stats", TensorProto.BOOL),
        value("logits_indices", TensorProto.INT64, "outputs"),
        *(value(f"{name}.0", TensorProto.FLOAT, *shape) for name, shape in caches),
    ]
    outputs = [
        value("logits", TensorProto.FLOAT, "outputs", VOCAB),
        value("stats", TensorProto.FLOAT, 1, "tokens", HEADS, 4),
        *(value(f"{name}_out.0", TensorProto.FLOAT, *shape) for name, shape in caches),
    ]
    graph = helper.make_graph(nodes, "counting", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte, whose id is the byte, and a special EOS token."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # ByteLevel shows other bytes from U+0100 on
    others = iter(range(256, 512))
    letters = {byte: chr(byte if byte in printable else next(others)) for byte in range(256)}
    tokenizer = Tokenizer(models.BPE({letter: byte for byte, letter in letters.items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return tokenizer


def write_folder(folder: Path, *, hashing: int, tokenizer: bool = True) -> Path:
    """Write a model folder with the tiny model, and return its path."""
    folder.mkdir()
    onnx.save(make_model(hashing), folder / "model.onnx")
    if tokenizer:
        byte_tokenizer().save(str(folder / "tokenizer.json"))
    Manifest(
        sharp_version="0",
        name=folder.name,
        source=SourceRecord(name="made by a test", architecture="Counting", sha256=""),
        opset=23,
        layers=1,
        q_heads=HEADS,
        kv_heads=1,
        head_dim=1,
        value_dim=1,
        vocab_size=VOCAB,
        max_context=MAX_CONTEXT,
        trained_context=MAX_CONTEXT,
        positions="none",
        norm=Norm(name="softmax", normalizer="softmax", trained=True),
        cache=Cache(block_size=BLOCK),
        tokenizer=TokenizerSettings(file="tokenizer.json" if tokenizer else None, eos_token_ids=(EOS,)),
    ).write(folder)
    return folder


@pytest.fixture(scope="session")
def counting(tmp_path_factory) -> Path:
    """Return a model folder that completes "a" with "bcd...": each token is the one before plus 1."""
    return write_folder(tmp_path_factory.mktemp("models") / "counting", hashing=0)


@pytest.fixture(scope="session")
def hashing(tmp_path_factory) -> Path:
    """Return a model folder whose next token depends on every token before it."""
    return write_folder(tmp_path_factory.mktemp("models") / "hashing", hashing=1)


@pytest.fixture(scope="session")
def ids_only(tmp_path_factory) -> Path:
    """Return a model folder like `counting`, but without a tokenizer."""
    return write_folder(tmp_path_factory.mktemp("models") / "ids-only", hashing=0, tokenizer=False)


def greedy_hashing(prompt: list[int], count: int) -> list[int]:
    """Return the tokens that the hashing model generates greedily, until EOS."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count and (len(tokens) == len(prompt) or tokens[-1] != EOS):
        total = sum((position + 1) * token for position, token in enumerate(tokens))
        tokens.append((tokens[-1] + 1 + total) % VOCAB)
    return tokens[len(prompt) :]


@pytest.fixture(scope="session")
def expected_hashing():
    """Return the hashing model's formula in plain Python."""
    return greedy_hashing


SETTINGS = Settings(
    ServerConfig(grpc_port=0, http_port=0, grace_seconds=0.2),
    EngineConfig(attention_interval=1),
    MetricsConfig(attention_metrics="head"),
    BackendConfig(threads=1, kernels=False),
)


@pytest.fixture(scope="session")
def server_settings() -> Settings:
    """Return the settings of test servers that choose no others."""
    return SETTINGS


@pytest.fixture(scope="session")
def loop_watch():
    """Watch the event loops of all servers that `start_server` starts."""
    with LoopWatch().installed() as watch:
        yield watch


@pytest.fixture(autouse=True)
def _the_event_loop_never_stands(loop_watch):
    loop_watch.found.clear()
    yield
    assert loop_watch.found == []


@pytest.fixture(scope="module")
def start_server(loop_watch):
    """Return `start_server(folder, engine=..., server=..., metrics=...)`; stop its servers after the tests."""
    running = []

    def start(folder: Path, **settings) -> Started:
        outcomes: queue.Queue = queue.Queue()

        async def main() -> None:
            stop = asyncio.Event()
            loop = asyncio.get_running_loop()

            def end() -> None:
                loop_watch.remove(loop)
                loop.call_soon_threadsafe(stop.set)

            def begin(started: Started) -> None:
                loop.call_soon(loop_watch.add, loop)  # the watch begins after the last work of the start
                outcomes.put((started, end))

            await run_server(
                folder,
                replace(SETTINGS, **settings),
                begin,
                stop,
            )

        def run() -> None:
            try:
                asyncio.run(main())
            except Exception as error:
                outcomes.put((error, None))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        started, stop = outcomes.get(timeout=30)
        if isinstance(started, Exception):
            raise started
        running.append((thread, stop))
        return started

    yield start
    for _, stop in running:
        stop()
    for thread, _ in running:
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def connect(start_server):
    clients = []

    def to(folder, **settings):
        clients.append(Client(start_server(folder, **settings).grpc_address))
        return clients[-1]

    yield to
    for client in clients:
        client.channel.close()


@pytest.fixture(scope="module")
def client(connect, counting):
    return connect(counting)


@pytest.fixture
def steps(monkeypatch):
    """Return a list that gets (sequences of the step, free blocks after it) for every step of an engine."""
    seen, step = [], Engine.step

    def counted(engine):
        events = step(engine)
        seen.append((len(engine._requests), engine.blocks.free))
        time.sleep(0.02)  # a step as long as a small model's, so that a cancellation has time to arrive
        return events

    monkeypatch.setattr(Engine, "step", counted)
    return seen


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def idle(steps):
    before = len(steps)
    time.sleep(0.1)
    return len(steps) == before


@pytest.fixture
def start_engine(counting, monkeypatch):
    backend = load_backend(counting, read_manifest(counting), BackendConfig(threads=1, kernels=False))
    return lambda blocks=32, **config: RunningEngine(
        backend, counting, monkeypatch, blocks, {"max_batch_tokens": 16, "max_sequences": 4, **config}
    )
