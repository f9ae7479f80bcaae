"""The server computes a first token at start, to check the model."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from sharp.core.errors import InputError
from sharp.serving.api.errors import DeviceLostError
from sharp.serving.backends.onnxruntime import OnnxRuntimeBackend
from sharp.serving.config import BackendConfig
from sharp.serving.llm import LLM
from tests.serving.conftest import write_folder

BACKEND = BackendConfig(threads=1, kernels=False)


def with_logits(folder: Path, number: float, place: slice) -> Path:
    """Write the counting model with `number` added to some of its logits, and return the folder."""
    write_folder(folder, hashing=0)
    model = onnx.load(folder / "model.onnx")
    for node in model.graph.node:
        node.output[:] = ["plain" if name == "logits" else name for name in node.output]
    added = np.zeros(257, np.float32)
    added[place] = number
    model.graph.initializer.append(numpy_helper.from_array(added, "added"))
    model.graph.node.append(helper.make_node("Add", ["plain", "added"], ["logits"]))
    onnx.save(model, folder / "model.onnx")
    return folder


@pytest.mark.parametrize(
    ("number", "place"), [(np.nan, slice(3, 4)), (np.inf, slice(3, 4)), (-np.inf, slice(None))], ids=str
)
def test_a_model_whose_first_token_is_not_finite_is_not_served(tmp_path: Path, number: float, place: slice):
    """A model whose first token has NaN or infinite logits is not served.

    Once it was served and failed every request.
    """
    with pytest.raises(InputError, match="model gives logits that are not finite for its first token"):
        LLM(with_logits(tmp_path / "model", number, place), backend=BACKEND)


def test_tokens_that_a_model_hides_do_not_keep_it_from_serving(tmp_path: Path):
    llm = LLM(with_logits(tmp_path / "model", -np.inf, slice(200, 256)), backend=BACKEND)
    assert llm.generate("a")[0].token_ids


def test_it_is_the_token_after_a_whole_prompt(tmp_path: Path, monkeypatch):
    """The server computes the token after a whole prompt, a batch as the model gets in service."""
    batches, step = [], OnnxRuntimeBackend.step
    monkeypatch.setattr(OnnxRuntimeBackend, "step", lambda *given: batches.append(given[1]) or step(*given))
    write_folder(tmp_path / "model", hashing=0)
    LLM(tmp_path / "model", backend=BACKEND)
    [batch] = batches
    # the prompt begins with the last token of the vocabulary, to check its embedding
    assert batch.input_ids.tolist() == [256, 1, 2, 3]
    assert batch.positions.tolist() == batch.slot_mapping.tolist() == [0, 1, 2, 3]
    assert (batch.query_start.tolist(), batch.logits_indices.tolist()) == ([0, 4], [3])


def test_a_gpu_that_is_lost_at_the_first_token_is_not_the_models_fault(tmp_path: Path, monkeypatch):
    def step(*_):
        raise DeviceLostError("the GPU is lost to this process")

    monkeypatch.setattr(OnnxRuntimeBackend, "step", step)
    write_folder(tmp_path / "model", hashing=0)
    with pytest.raises(DeviceLostError, match=r"^the GPU is lost to this process$"):
        LLM(tmp_path / "model", backend=BACKEND)
