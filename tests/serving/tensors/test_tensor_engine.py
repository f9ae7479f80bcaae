"""The engine of models of sets and of numbers: batches of rows, and model folders that it refuses."""

import json
from dataclasses import replace

import numpy as np
import pytest

from sharp.core.errors import InputError
from sharp.core.manifest import MANIFEST_FILE, read_manifest
from sharp.serving.api.events import ComputedRows, Failed
from sharp.serving.api.tensors import TensorRequest
from sharp.serving.backends.rows import RowOutput
from sharp.serving.config import BackendConfig, EngineConfig
from sharp.serving.tensors.engine import TensorEngine
from sharp.serving.tensors.folder import load_tensor_folder
from tests.marks import full
from tests.tensor_models import export_tensor_model, numbers_model, set_model

BAD = 66.0
CPU = BackendConfig(device="cpu", threads=1)


class Backend:
    """A backend whose output for a row is the sum of the row's numbers."""

    def __init__(self):
        self.batches = []

    def run(self, inputs, *, collect_stats):
        (numbers,) = inputs.values()
        self.batches.append(numbers.shape)
        if (numbers == BAD).any():
            raise RuntimeError("a kernel failed")
        stats = np.ones((1, len(numbers), 2, numbers.shape[1], 4), np.float32) if collect_stats else None
        return RowOutput(numbers.sum(1, keepdims=True), stats)


@pytest.fixture
def engine(request):
    from tests.serving.encoder.test_encoder_engine import MANIFEST

    return TensorEngine(Backend(), MANIFEST, EngineConfig(**getattr(request, "param", {})))


def asked(name, *rows):
    numbers = np.array(rows, np.float32)
    return TensorRequest(name, {"numbers": numbers}, numbers.shape[1])


def run(engine):
    """Run the engine to the end, and return the values or the error of every request."""
    found = {}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, ComputedRows):
                found[event.request_id] = event.values[:, 0].tolist()
            elif isinstance(event, Failed):
                found[event.request_id] = str(event.error)
        engine.check_integrity()
    return found


def test_rows_of_one_length_share_a_batch(engine):
    engine.add(asked("a", [1, 2], [3, 4]))
    engine.add(asked("b", [5, 6, 7]))
    engine.add(asked("c", [8, 9]))
    assert run(engine) == {"a": [3, 7], "b": [18], "c": [17]}
    assert engine._backend.batches == [(3, 2), (1, 3)]
    report = engine.report()
    assert (report.prompt_tokens, report.padding_tokens, report.batch_texts) == (9, 0, (3, 1))
    assert [sorted(rows.visible[0].tolist()) for rows in report.attention] == [[1, 1, 1, 2, 2, 2]]


@pytest.mark.parametrize("engine", [{"max_batch_tokens": 4, "max_sequences": 3}], indirect=True)
def test_batches_are_of_limited_size(engine):
    engine.add(asked("a", *([number] for number in range(5))))
    engine.add(asked("b", [1] * 9))
    assert run(engine) == {"a": [0, 1, 2, 3, 4], "b": [9]}
    assert sorted(engine._backend.batches) == [(1, 9), (2, 1), (3, 1)]


def test_a_batch_that_fails_loses_its_requests_alone(engine):
    engine.add(asked("bad", [BAD]))
    engine.add(asked("good", [1, 2]))
    assert run(engine) == {"bad": "a batch of the model failed: a kernel failed", "good": [3]}


@pytest.fixture(scope="module")
def numbers(tmp_path_factory):
    return export_tensor_model(tmp_path_factory.mktemp("numbers"), numbers_model())


@pytest.mark.parametrize(
    "options", [(), full(("--target", "portable")), ("--dtype", "float16"), full(("--quantize", "int8"))]
)
def test_folders_are_served_however_they_were_exported(tmp_path, options):
    model = set_model("entmax")
    loaded, _, engine = load_tensor_folder(export_tensor_model(tmp_path, model, *options), CPU, EngineConfig())
    inputs = {"items": np.ones((2, 5, 11), np.float32), "query": np.ones((2, 1), np.float32)}
    engine.add(loaded.prepare_tensors(TensorRequest("a", inputs)))
    assert len(run(engine)["a"]) == 2


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("inputs", [], "inputs and outputs the server does not know"),
        ("outputs", [], "inputs and outputs the server does not know"),
        ("inputs", [{"name": "numbers", "dtype": "int64", "shape": ["batch", "length"]}], "the server does not know"),
        ("inputs", [{"name": "numbers", "dtype": "float32", "shape": ["batch", "batch"]}], "the server does not know"),
        ("inputs", [{"name": "numbers", "dtype": "float32", "shape": ["batch", "a", "b"]}], "the server does not know"),
        ("inputs", [{"name": "digits", "dtype": "float32", "shape": ["batch", "length"]}], "lacks digits"),
        ("inputs", [{"name": "numbers", "dtype": "float32", "shape": ["batch", "length", 3]}], "does not run"),
        ("outputs", [{"name": "predictions", "dtype": "float32", "shape": ["batch", 7]}], "gives [1, 4, 2] numbers"),
        ("cache", {"form": "paged"}, "the server does not know"),
    ],
)
def test_a_folder_that_says_something_else_is_refused(numbers, field, value, sentence):
    path = numbers / MANIFEST_FILE
    before = path.read_text()
    try:
        path.write_text(json.dumps({**json.loads(before), field: value}))
        with pytest.raises(InputError) as error:
            load_tensor_folder(numbers, CPU, EngineConfig())
        assert sentence in str(error.value)
    finally:
        path.write_text(before)


def test_settings_that_do_not_fit_are_refused(numbers):
    with pytest.raises(InputError, match="run in onnxruntime only"):
        load_tensor_folder(numbers, replace(CPU, name="tensorrt"), EngineConfig())
    with pytest.raises(InputError, match="max_context is 300; the model takes at most 200"):
        load_tensor_folder(numbers, CPU, EngineConfig(max_context=300))
    assert read_manifest(numbers).max_context == 200
