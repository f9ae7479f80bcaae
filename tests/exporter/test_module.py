"""`sharp.export(module)` and `sharp-export MODEL.pt2` write the folder that a user expects."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnxruntime.capi.onnxruntime_pybind11_state import Fail
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import sharp
from sharp.core.errors import InputError, NotFoundError, VerificationError
from sharp.core.manifest import read_manifest
from sharp.exporter.forms.paged.session import PagedSession
from sharp.exporter.inspection.heads import head_statistics
from sharp.exporter.inspection.inspection import choose_text, open_model
from sharp.exporter.inspection.prompt import PromptSource
from sharp.exporter.module import evaluated, trace
from sharp.exporter.programs import flat_graph
from sharp.models.normalized_attention import normalized_attention
from tests.exporter.programs import gpt


def test_a_module_is_exported_paged_and_left_as_it_was(tmp_path: Path) -> None:
    module = gpt.GPT(gpt.alibi).train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    result = sharp.export(
        module,
        (torch.zeros(1, 9, dtype=torch.int64),),
        norm="ssa",
        norm_parameters={"b": 1.2, "n": 2.0},
        tokenizer="bytes",
        output=tmp_path / "model",
    )
    assert result.verification.passed
    manifest = read_manifest(tmp_path / "model")
    assert (manifest.kind, manifest.cache.form, manifest.norm.name, manifest.norm.trained) == (
        *("decoder", "paged", "ssa"),
        True,
    )
    assert (manifest.max_context, manifest.tokenizer.file, manifest.tokenizer.eos_token_ids) == (
        gpt.CONTEXT,
        "tokenizer.json",
        (256,),
    )
    assert module.training
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_an_unrolled_loop_of_many_writes_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_graph, "MOST_WRITES", 1)
    inputs = (torch.zeros(1, 9).long(),)
    with pytest.raises(InputError, match=r"writes into tensors 2 times, first at node copy_, gpt.py .* at most 1 are"):
        sharp.export(gpt.GPT(gpt.written_into, layers=2), inputs, output=tmp_path / "one")


def test_heads_that_are_written_in_place_are_exported(tmp_path: Path) -> None:
    result = sharp.export(
        gpt.GPT(gpt.written_into, layers=2), (torch.zeros(1, 9).long(),), norm="softmax", output=tmp_path / "one"
    )
    assert result.verification.passed


class RootMeanSquare(nn.Module):
    """litgpt's norm: casts to float32 and back to the input's type, which the graph keeps as float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(gpt.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.weight.to(x.dtype)


def test_a_module_in_half_precision_has_learned_positions_and_casts_of_its_own(tmp_path: Path) -> None:
    module = gpt.GPT()
    module.norms[0] = RootMeanSquare()
    inputs = (torch.zeros(1, 9, dtype=torch.int64),)
    result = sharp.export(module, inputs, norm="softmax", dtype="float16", output=tmp_path / "half")
    assert result.verification.passed
    model = onnx.load(tmp_path / "half" / "model.onnx", load_external_data=False)
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)


def test_a_layer_with_sinks_beside_one_without(tmp_path: Path) -> None:
    sinks = nn.Parameter(torch.tensor([-9.0, 0.0, 2.0, 5.0]))
    named = partial(normalized_attention, norm="softmax", causal=True)
    module = gpt.GPT(named, layers=2)
    module.attention[1].attend = partial(named, sinks=sinks)
    result = sharp.export(module, (torch.zeros(1, 9).long(),), norm="softmax", output=tmp_path / "out")
    assert result.verification.passed and read_manifest(tmp_path / "out").stats_columns == 5
    records = open_model(tmp_path / "out").record(np.arange(9))
    assert [record.stats.shape[-1] for record in records] == [5, 5]
    assert not records[0].stats[..., 4].any()
    mass = head_statistics(records, "out").sink
    assert mass is not None
    assert not mass[0].any() and mass[1].min() > 0 and mass[1, 3].min() > 0.9


def test_a_tokenizer_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    inputs = (torch.zeros(1, 9, dtype=torch.int64),)
    with pytest.raises(NotFoundError, match=r"^the tokenizer .*nowhere does not exist"):
        sharp.export(gpt.GPT(), inputs, norm="softmax", tokenizer=tmp_path / "nowhere", output=tmp_path / "out")


def test_a_model_that_onnx_runtime_cannot_run_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(*_: object) -> None:
        raise Fail("node_Range_264 has another shape")

    monkeypatch.setattr(PagedSession, "step", step)
    with pytest.raises(VerificationError, match=r"ONNX Runtime cannot run the model, .* node_Range_264"):
        sharp.export(gpt.GPT(), (torch.zeros(1, 9).long(),), norm="softmax", output=tmp_path / "one")
    assert not (tmp_path / "one").exists()


def test_a_saved_program_is_exported_from_the_command_line(tmp_path: Path, sharp_export) -> None:
    module, path = gpt.GPT(last=True), tmp_path / "tiny.pt2"
    with evaluated(module):
        torch.export.save(trace(module, (torch.zeros(1, 9, dtype=torch.int64),)), path)
    result = sharp_export(path, "--norm", "softmax", "--cache", "contiguous", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert read_manifest(tmp_path / "out").source.name == "tiny"
    planned = sharp_export(
        path, "--norm", "softmax", "--quantize", "int4", "--dry-run", "--json", "-o", tmp_path / "four"
    )
    whole = sharp_export(path, "--norm", "softmax", "--dry-run", "--json", "-o", tmp_path / "four")
    sizes = [json.loads(result.stdout)["weight_bytes"] for result in (planned, whole)]
    assert sizes[0] < 0.8 * sizes[1]
    refused = sharp_export(path, "--norm", "ssa", "-o", tmp_path / "other")
    assert refused.exit_code == 2
    assert "--untrained-norm" in refused.output


@pytest.mark.parametrize(
    ("attend", "norm"), [(gpt.fused, "softmax"), (gpt.with_weights(gpt.ssa_of_the_authors), "ssa")]
)
def test_without_a_norm_a_program_has_that_of_its_graph(
    tmp_path: Path, sharp_export, monkeypatch: pytest.MonkeyPatch, attend: gpt.Attend, norm: str
) -> None:
    module, path = gpt.GPT(attend), tmp_path / "tiny.pt2"
    with evaluated(module):
        torch.export.save(trace(module, (torch.zeros(1, 9, dtype=torch.int64),)), path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"tiny-{norm}").mkdir()
    assert sharp_export(path, "--dry-run", "--quiet").exit_code == 0
    (tmp_path / f"tiny-{norm}" / "file").touch()
    refused = sharp_export(path)
    assert refused.exit_code == 2
    assert f"the output folder tiny-{norm} is not empty" in refused.output
    planned = sharp_export(path, "--dry-run", "--json", "-o", "out")
    plan = json.loads(planned.stdout)
    assert (plan["norm"], plan["trained"]) == (norm, True)
    half = sharp_export(path, "--ssa-b", "2", "--dry-run", "-o", "out")
    assert half.exit_code == 2
    said = "give both --ssa-b and --ssa-n, or neither" if norm == "ssa" else "--ssa-b is for norm ssa, not for softmax"
    assert said in " ".join(half.output.split())


def test_a_saved_program_is_inspected_with_a_tokenizer(tmp_path: Path) -> None:
    module, path = gpt.GPT(), tmp_path / "tiny.pt2"
    with evaluated(module):
        torch.export.save(trace(module, (torch.zeros(1, 9, dtype=torch.int64),)), path)
    model = open_model(path, "bytes")
    text = choose_text(model, PromptSource(None, "To be or not", None, None), None, None)
    assert list(text.token_ids) == list(b"To be or not")
    (tmp_path / "sharp.json").write_text("{}")
    with pytest.raises(InputError, match="--tokenizer is for checkpoints that have none"):
        open_model(tmp_path, "bytes")


def test_a_model_that_cannot_read_its_last_token_is_refused(tmp_path: Path) -> None:
    """A model whose embedding lacks the last token is refused.

    Random tokens of the verification may leave out the last token. A step of the server then failed for all its
    requests.
    """
    module = gpt.GPT()
    narrow = nn.Embedding(gpt.VOCABULARY - 1, gpt.WIDTH)
    name = next(name for name, one in module.named_children() if isinstance(one, nn.Embedding))
    setattr(module, name, narrow)
    with pytest.raises(InputError, match=r"has logits for \d+ tokens and fails where it reads the last .* embeddings"):
        sharp.export(module, (torch.zeros(1, 9, dtype=torch.int64),), norm="softmax", output=tmp_path / "out")


class Reader(nn.Module):
    """Attention of queries over a memory of another length, some of which is padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Linear(gpt.WIDTH, gpt.WIDTH) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor, padding: Tensor) -> Tensor:
        def heads(tensor: Tensor) -> Tensor:
            return tensor.unflatten(-1, (gpt.HEADS, -1)).transpose(1, 2)

        query, key, value = heads(self.query(x)), heads(self.key(memory)), heads(self.value(memory))
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=~padding[:, None, None, :])
        return mixed.transpose(1, 2).flatten(2)


def test_cross_attention_with_padding_has_whole_sequences_only(tmp_path: Path) -> None:
    inputs = (torch.randn(2, 9, 32), torch.randn(2, 5, 32), torch.zeros(2, 5, dtype=torch.bool))
    result = sharp.export(
        Reader(), inputs, norm="sparsemax", cache="none", untrained_norm=True, output=tmp_path / "model"
    )
    assert result.verification.passed
    assert read_manifest(tmp_path / "model").kind == "module"
    assert [port.name for port in result.manifest.inputs] == ["x", "memory", "padding", "collect_stats"]
    with pytest.raises(InputError, match="cannot have a cache: it does not take token ids"):
        sharp.export(Reader(), inputs, norm="softmax", output=tmp_path / "other")


class Masked(Reader):
    """Attention with a mask that the caller passes unchanged."""

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (
            tensor.unflatten(-1, (gpt.HEADS, -1)).transpose(1, 2)
            for tensor in (self.query(x), self.key(memory), self.value(memory))
        )
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (
            torch.ones(9, 5).bool(),
            "the mask of attention .* does not hide, for all queries alike, the keys that input mask marks",
        ),
        (torch.ones(2, 1, 9, 5).bool(), r"input mask, .* must be of shape \[batch, keys\] to be padding"),
        (torch.zeros(2, 1, 9, 5), "depends on what is in input mask; Sharp knows masks that are causal"),
    ],
    ids=["queries and keys", "whole", "numbers"],
)
def test_a_mask_that_is_no_padding_is_refused(tmp_path: Path, mask: Tensor, message: str) -> None:
    inputs = (torch.randn(2, 9, 32), torch.randn(2, 5, 32), mask)
    with pytest.raises(InputError, match=message):
        sharp.export(Masked(), inputs, norm="softmax", cache="none", output=tmp_path / "model")


@pytest.mark.parametrize(
    ("content", "owner"),
    [
        ({"model": {"transformer.h.0.attn.c_attn.weight": torch.zeros(1)}, "model_args": {"n_layer": 1}}, "nanoGPT"),
        ({"transformer.h.0.attn.qkv.weight": torch.zeros(1)}, "litgpt"),
        ({"net.attn_layers.layers.0.1.to_q.weight": torch.zeros(1)}, "x-transformers"),
        ({"encoder.weight": torch.zeros(1)}, "holds weights and not its code"),
        (
            {"state_dict": {"net.encoder.weight": torch.zeros(1)}, "pytorch-lightning_version": "2.5.0"},
            "holds the weights of a Lightning model and not its code",
        ),
        (
            {
                f"module.decoder.layers.0.self_attention.{name}": torch.zeros(1)
                for name in ("core_attention.ssa_n_raw", "linear_qkv.weight")
            },
            "SSATritonV4Attention",
        ),
        # Names in github.com/omyokun/SSA, GPT2SSA/model.py, and in files that Lightning saves for deep-spin/asentmax.
        (
            {
                "model": {
                    f"_orig_mod.transformer.h.0.attn.{name}": torch.zeros(1) for name in ("a", "n", "c_attn.weight")
                },
            },
            "attn.flash = False",
        ),
        (
            {
                "state_dict": {
                    "net.model.model.layers.0.self_attn.attn_scale_beta_proj.weight": torch.zeros(1),
                    "net.model.model.layers.0.self_attn.q_proj.weight": torch.zeros(1),
                },
                "hyper_parameters": Path("an object that no reader of plain data takes"),
            },
            "use_fast_attn=False",
        ),
    ],
)
@pytest.mark.parametrize("suffix", [".pt", ".ckpt"])
def test_weights_alone_are_told_whose_they_are_and_what_to_do(
    tmp_path: Path, sharp_export, content: object, owner: str, suffix: str
) -> None:
    path = tmp_path / f"checkpoint{suffix}"
    torch.save(content, path)
    result = sharp_export(path, "--norm", "softmax", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert owner in result.output.replace("\n", " ")
    assert "sharp export FILE.py:CLASS --weights" in result.output.replace("\n", " ")


def test_weights_in_safetensors_are_told_so_too(tmp_path: Path, sharp_export) -> None:
    save_file({"attn_layers.layers.0.1.to_q.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    result = sharp_export(tmp_path / "model.safetensors", "--norm", "softmax", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "TransformerWrapper" in result.output.replace("\n", " ")


def test_a_folder_of_megatron_is_told_what_to_do(tmp_path: Path, sharp_export) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "__0_0.distcp").write_bytes(b"")
    result = sharp_export(tmp_path, "--norm", "ssa", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "holds weights and not its code" in result.output.replace("\n", " ")


def test_what_sharp_adapt_cannot_train_is_told_what_to_do(tmp_path: Path) -> None:
    settings = sharp.AdaptSettings("entmax")
    with pytest.raises(InputError, match=r"not GPT; for a module of your own there is sharp\.adapt_module"):
        # The test passes a module in place of a path on purpose.
        sharp.adapt(gpt.GPT(), settings, tmp_path / "out")  # type: ignore[arg-type]
    path = tmp_path / "model.pt2"
    path.touch()
    with pytest.raises(InputError, match=r"for a module of your own there is sharp\.adapt_module"):
        sharp.adapt(path, settings, tmp_path / "out")
