"""Attention rows are computed one at a time, ended in time, and refused with a sentence."""

import asyncio
import threading
import time

import pytest

from sharp.core.manifest import MANIFEST_FILE, read_manifest
from sharp.serving.api.errors import EngineError, InputError, QueueFullError, TimeLimitError, UnavailableError
from sharp.serving.config import BackendConfig
from sharp.serving.engine import attention_process
from sharp.serving.engine.attention_process import AttentionProcess, TokenWeights
from sharp.serving.frontends.token_attention import MOST_WAITING, TokenAttention

ROW = '{"row": {"first": 0, "weights": [1.0], "entropy": 0.0, "sink_mass": 0.0}}'
PROGRAM = """
import sys, time
sys.stdin.readline()
for line in sys.stdin:
    {body}
    print('{reply}', flush=True)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Return a function that puts another program in the worker's place, which runs `body` before it replies."""

    def put(body: str, reply: str = ROW) -> None:
        path = tmp_path / "program.py"
        path.write_text(PROGRAM.format(body=body, reply=reply))
        monkeypatch.setattr(attention_process, "PROGRAM", path)

    return put


@pytest.fixture
def process(counting):
    made = AttentionProcess(counting, threads=1)
    yield made
    made.close()


def test_the_process_is_kept_and_ends_when_nobody_asks(process, program, monkeypatch):
    monkeypatch.setattr(attention_process, "IDLE_SECONDS", 0.5)
    program("pass")
    assert process.row([1], 0, 0, 0) == TokenWeights(0, [1.0], 0.0, 0.0)
    worker = process._process
    process.row([1], 0, 0, 0)
    assert process._process is worker
    deadline = time.monotonic() + 20
    while process._process is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert process._process is None
    assert not worker.runs
    assert process.row([1], 0, 0, 0).weights == [1.0]


def test_it_ends_at_once_also_while_the_process_starts(process, program, monkeypatch):
    program("time.sleep(60)")
    starting, started = threading.Event(), attention_process.WorkerProcess

    def slow(path):
        starting.set()
        time.sleep(0.5)
        return started(path)

    monkeypatch.setattr(attention_process, "WorkerProcess", slow)
    errors = []

    def row():
        try:
            process.row([1], 0, 0, 0)
        except UnavailableError as error:
            errors.append(error)

    thread = threading.Thread(target=row)
    thread.start()
    assert starting.wait(20)
    process.close()
    thread.join(20)
    assert not thread.is_alive() and len(errors) == 1


def test_what_takes_too_long_is_ended(process, program, monkeypatch):
    monkeypatch.setattr(attention_process, "SECONDS", 0.2)
    program("time.sleep(60)")
    with pytest.raises(TimeLimitError, match=r"attention of 3 tokens takes longer than 0\.2 s"):
        process.row([1, 2, 3], 0, 0, 0)
    assert not process._process.runs


def test_a_process_that_ends_is_an_error_and_the_next_row_starts_another(process, program):
    program("sys.exit(9)")
    with pytest.raises(UnavailableError, match="perhaps for want of memory"):
        process.row([1], 0, 0, 0)
    program("pass")
    assert process.row([1], 0, 0, 0).weights == [1.0]


def test_an_error_of_the_model_is_its_sentence(process, program):
    program("pass", '{"error": "the weights are not finite"}')
    with pytest.raises(EngineError, match="not finite"):
        process.row([1], 0, 0, 0)


def test_a_folder_that_has_changed_is_not_read(tmp_path, counting):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in counting.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    process = AttentionProcess(folder, threads=1)
    (folder / MANIFEST_FILE).write_text((folder / MANIFEST_FILE).read_text() + "\n")
    with pytest.raises(EngineError, match="has changed since the server loaded it"):
        process.row([1], 0, 0, 0)
    process.close()


def test_a_graph_without_attention_nodes_is_a_sentence(process):
    with pytest.raises(EngineError, match="0 attention nodes for 1 layers"):
        process.row([1], 0, 0, 0)


def test_closing_ends_a_row_that_is_computed(process, program):
    program("time.sleep(60)")
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            process.row([1], 0, 0, 0)
        except UnavailableError as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    deadline = time.monotonic() + 20
    while process._process is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.close()
    asking.join(20)
    assert len(errors) == 1
    with pytest.raises(UnavailableError):
        process.row([1], 0, 0, 0)


def test_one_row_is_computed_at_a_time_and_few_wait(counting, monkeypatch):
    going, most = [], []
    free = threading.Event()

    def row(_self, *_arguments):
        going.append(1)
        most.append(len(going))
        free.wait(20)
        going.pop()
        return TokenWeights(0, [1.0], 0.0, 0.0)

    monkeypatch.setattr(AttentionProcess, "row", row)

    async def ask() -> list:
        attention = TokenAttention(counting, read_manifest(counting), "cpu", BackendConfig(threads=2), kernels=True)
        asked = [asyncio.create_task(attention.row([1], 0, 0, 0)) for _ in range(1 + MOST_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match=f"{MOST_WAITING} requests wait"):
            await attention.row([1], 0, 0, 0)
        free.set()
        rows = await asyncio.gather(*asked)
        attention.close()
        return rows

    assert len(asyncio.run(ask())) == 1 + MOST_WAITING
    assert set(most) == {1}


@pytest.mark.parametrize(
    ("device", "kernels", "why"), [("cuda", True, "runs on a GPU"), ("cpu", False, "runs without them")]
)
def test_where_it_cannot_be_computed_a_sentence_says_so(counting, device, kernels, why):
    attention = TokenAttention(counting, read_manifest(counting), device, BackendConfig(threads=2), kernels=kernels)
    assert why in attention.refusal
    with pytest.raises(InputError, match=why):
        asyncio.run(attention.row([1], 0, 0, 0))
    attention.close()
