"""`key_bound` is an upper limit of every key's length, for all tokens and for every way to export the model."""

import math
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper, numpy_helper

from sharp import LLM, SamplingParams
from sharp.exporter.graph.key_bounds import ROUNDING, key_bounds
from sharp.exporter.graph.quantization import EIGHT_BITS, FOUR_BITS, Packing, _run_quantizer
from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.checkpoint import save_checkpoint
from sharp.models.config import SharpConfig
from sharp.serving.config import EngineConfig
from tests.exporter.conftest import tiny_model

CONFIG = SharpConfig(
    vocab_size=31, hidden_size=80, intermediate_size=96, layers=2, q_heads=8, kv_heads=4, head_dim=8,
    norm="asentmax", positions="nape", trained_context=64, max_context=64,
)  # fmt: skip


def make_model(**changes: object) -> SharpForCausalLM:
    """Return a model whose weights and gains differ from row to row and from channel to channel."""
    torch.manual_seed(3)
    model = SharpForCausalLM(replace(CONFIG, **changes))
    with torch.no_grad():
        for block in model.blocks:
            block.attention_norm.weight.uniform_(-3, 3)
            block.attention.k_proj.weight.mul_(torch.randn(CONFIG.kv_heads * CONFIG.head_dim, 1).exp())
    return model.eval()


def worst_token(model: SharpForCausalLM, layer: int, head: int) -> torch.Tensor:
    """Return the hidden state with the head's longest key, by the first singular vector of the head's weights."""
    block = model.blocks[layer]
    rows = block.attention.k_proj.weight.unflatten(0, (CONFIG.kv_heads, -1))[head] * block.attention_norm.weight
    return 1e6 * torch.linalg.svd(rows.detach()).Vh[0]


def test_the_bound_is_reached_and_not_passed() -> None:
    model = make_model()
    for layer, (block, bound) in enumerate(zip(model.blocks, key_bounds(model), strict=True)):
        lengths = []
        for head in (0, 1):  # the key heads of the four query heads with slopes
            keys = block.attention.k_proj(block.attention_norm(worst_token(model, layer, head)))
            lengths.append(keys.unflatten(0, (CONFIG.kv_heads, -1)).norm(dim=-1)[head].item())
        assert 0.5 * bound < max(lengths) < bound / ROUNDING


def test_heads_without_a_slope_do_not_count() -> None:
    model = make_model()
    before = key_bounds(model)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.k_proj.weight[2 * CONFIG.head_dim :] *= 100
    assert key_bounds(model) == before
    assert key_bounds(make_model(positions="alibi")) != key_bounds(make_model())
    assert key_bounds(make_model(positions="rope")) == (0.0, 0.0)


@pytest.mark.parametrize("packing", [EIGHT_BITS, FOUR_BITS])
def test_the_bound_holds_for_quantized_products(packing: Packing) -> None:
    model = make_model()
    for layer, (block, bound) in enumerate(zip(model.blocks, key_bounds(model), strict=True)):
        weight = block.attention.k_proj.weight.detach().numpy().T.copy()
        tokens = torch.stack([worst_token(model, layer, head) for head in (0, 1)])
        keys = multiply(packed(weight, packing), block.attention_norm(tokens).detach().numpy())
        lengths = np.linalg.norm(keys.reshape(2, CONFIG.kv_heads, -1), axis=2)
        assert max(lengths[0, 0], lengths[1, 1]) < bound


def packed(weight: np.ndarray, packing: Packing) -> onnx.ModelProto:
    """Return a model of one product with `weight`, packed in the format that `--quantize` writes."""
    value = helper.make_tensor_value_info
    node = helper.make_node("MatMul", ["x", "weight"], ["y"], "product")
    graph = helper.make_graph(
        [node],
        "product",
        [value("x", onnx.TensorProto.FLOAT, [None, weight.shape[0]])],
        [value("y", onnx.TensorProto.FLOAT, [None, weight.shape[1]])],
        [numpy_helper.from_array(weight, "weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return _run_quantizer(model, packing, ["product"])


def multiply(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    product: np.ndarray = session.run(None, {"x": x})[0]
    assert model.graph.node[0].op_type == "MatMulNBits" and math.isfinite(product.sum())
    return product


def test_a_large_gain_beside_small_ones_is_covered() -> None:
    """The bound covers rounded weights beside one large gain.

    A large gain makes the quantization steps of its block large, and the rounding errors of the block's other channels
    add up.
    """
    model = make_model(hidden_size=256)
    with torch.no_grad():
        block = model.blocks[0]
        block.attention_norm.weight.fill_(1.0)
        block.attention_norm.weight[::64] = 60.0
        block.attention.k_proj.weight.zero_()
        block.attention.k_proj.weight[0].fill_(1.0)
        block.attention.k_proj.weight[0, ::64] = 0.0
    weight = block.attention.k_proj.weight.detach().numpy().T.copy()
    hidden = torch.ones(200, 256) + 0.05 * torch.arange(200)[:, None] * (torch.arange(256) % 64 == 0)
    for packing in (EIGHT_BITS, FOUR_BITS):
        keys = multiply(packed(weight, packing), block.attention_norm(1e3 * hidden).detach().numpy())
        assert np.abs(keys[:, 0]).max() < key_bounds(model)[0]


def test_an_exported_model_without_statistics_has_the_logprobs_of_pytorch(tmp_path, sharp_export) -> None:
    """A model that generates without statistics, and so reads only a window of keys, has the logprobs of PyTorch.

    Verification always requests statistics, which turn the window off.
    """
    model = tiny_model("asentmax", "nape", max_context=1024)
    with torch.no_grad():
        for block in model.blocks:  # logits are so large that keys far away matter
            block.attention.q_proj.weight *= 8
            block.attention.k_proj.weight *= 8
    save_checkpoint(tmp_path / "tiny.safetensors", model, dtype=torch.float32)
    exported = sharp_export(tmp_path / "tiny.safetensors", "--norm", "asentmax", "-o", tmp_path / "out")
    assert exported.exit_code == 0, exported.output
    ids = torch.randint(3, 250, (600,), generator=torch.Generator().manual_seed(1)).tolist()
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    llm = LLM(tmp_path / "out", engine=EngineConfig(attention_interval=0))
    found = [entry.logprob for entry in llm.generate([ids], params)[0].prompt_logprobs]
    with torch.no_grad():
        expected = model(torch.tensor([ids]))[0, :-1].double().log_softmax(-1)
    np.testing.assert_allclose(found, expected[range(599), ids[1:]], atol=2e-4)
