"""`sharp-export` on checkpoints of our own and of Hugging Face writes a verified model folder."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import helper
from onnxruntime.quantization import QuantType, quantize_dynamic
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GenerationConfig

from sharp.core.errors import InputError
from sharp.core.manifest import SamplingDefaults, read_manifest
from sharp.exporter.checkpoints.reading import read_source
from sharp.exporter.checkpoints.sampling_defaults import read_sampling
from sharp.exporter.report import sampling_line
from sharp.exporter.staging import UNLOCKED_SECONDS, Staging, remove_stale
from sharp.models.checkpoint import save_checkpoint
from sharp.models.config import RopeScaling
from sharp.models.hugging_face import to_hugging_face
from sharp.models.norms import NORMS
from sharp.plugins import library_path
from sharp.plugins.op.schema import DOMAIN
from tests.exporter.conftest import tiny_model
from tests.exporter.tiny_hugging_face import save, tiny
from tests.marks import full
from tests.serving.conftest import write_folder

# Every norm occurs once, every position scheme at least twice.
OTHERS = {
    *("fixed-temperature", "ssmax-bias", "assmax", "sparsemax", "sentmax", "relu", "relu2", "relu2-n", "sigmoid-n"),
    "llama4",
}
COMBINATIONS = [
    full(norm, positions) if norm in OTHERS else (norm, positions)
    for norm, positions in zip(NORMS, ("rope", "nape", "alibi", "none") * len(NORMS), strict=False)
]


@pytest.mark.parametrize(("norm", "positions"), COMBINATIONS)
def test_every_norm_exports_and_agrees_with_pytorch(checkpoint, sharp_export, tmp_path, norm, positions):
    result = sharp_export(checkpoint(norm, positions), "--norm", norm, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.norm.name, manifest.norm.trained, manifest.positions) == (norm, True, positions)
    comparisons = manifest.verification["comparisons"]
    assert {comparison["runtime"] for comparison in comparisons} == {"kernels", "inlined"}
    assert all(comparison["logits_error"] < 1e-4 for comparison in comparisons)
    assert "UNTRAINED" not in result.output
    nodes = [node for node in onnx.load(tmp_path / "out" / "model.onnx").graph.node if node.domain == DOMAIN]
    bounds = [helper.get_node_attr_value(node, "key_bound") for node in nodes]
    assert all((bound > 0) == (positions in ("nape", "alibi")) for bound in bounds)


@pytest.mark.parametrize(("alpha", "positions"), [(8, "nape"), full(3, "rope"), full(16, "alibi"), full(64, "nape")])
def test_a_large_alpha_is_verified(checkpoint, sharp_export, tmp_path, alpha, positions):
    options = ("--norm", "asentmax", "--alpha", str(alpha))
    result = sharp_export(checkpoint("asentmax", positions, layers=2), *options, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert read_manifest(tmp_path / "out").norm.alpha == alpha


def test_a_model_says_nothing_of_the_machine_that_wrote_it(checkpoint, sharp_export, tmp_path):
    assert sharp_export(checkpoint("ssa", "nape"), "--norm", "ssa", "-o", tmp_path / "out").exit_code == 0
    written = (tmp_path / "out" / "model.onnx").read_bytes()
    assert [
        part for part in (b".py", str(Path(torch.__file__).parents[1]).encode(), bytes(tmp_path)) if part in written
    ] == []


def test_pt_checkpoint_and_default_folder(checkpoint, sharp_export, tmp_path, monkeypatch):
    source = checkpoint("ssa", "nape", suffix=".pt")
    monkeypatch.chdir(tmp_path)
    result = sharp_export(source, "--norm", "ssa")
    assert result.exit_code == 0, result.output
    assert {"model.onnx", "model.onnx.data", "sharp.json", "tokenizer.json"} <= {
        file.name for file in (tmp_path / "tiny-ssa").iterdir()
    }


def test_the_current_folder_as_output(checkpoint, sharp_export, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    result = sharp_export(checkpoint("softmax"), "--norm", "softmax", "-o", ".")
    assert result.exit_code == 0, result.output
    assert read_manifest(tmp_path / "mine").name == "mine"


def test_a_model_that_does_not_read_bytes_gets_no_byte_tokenizer(sharp_export, tmp_path):
    save_checkpoint(tmp_path / "words.safetensors", tiny_model("softmax", tokenizer="none"))
    assert sharp_export(tmp_path / "words.safetensors", "--norm", "softmax", "-o", tmp_path / "out").exit_code == 0
    assert read_manifest(tmp_path / "out").tokenizer.file is None
    assert not (tmp_path / "out" / "tokenizer.json").exists()


@pytest.mark.parametrize("rope_scaling", [get_args(RopeScaling)[0], *map(full, get_args(RopeScaling)[1:])])
def test_rope_with_a_scaling_factor(sharp_export, tmp_path, rope_scaling):
    model = tiny_model("softmax", rope_factor=16.0, rope_scaling=rope_scaling, trained_context=32)
    save_checkpoint(tmp_path / "rope.safetensors", model)
    result = sharp_export(tmp_path / "rope.safetensors", "--norm", "softmax", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert all(
        comparison["logits_error"] < 1e-4 for comparison in read_manifest(tmp_path / "out").verification["comparisons"]
    )


@pytest.mark.parametrize(("norm", "positions"), [("ssa", "nape"), full("asentmax", "rope")])
def test_a_hugging_face_folder_of_our_own_keeps_its_trained_norm(sharp_export, tmp_path, norm, positions):
    to_hugging_face(tiny_model(norm, positions)).save_pretrained(tmp_path / "mine")
    result = sharp_export(tmp_path / "mine", "--norm", norm, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "UNTRAINED" not in result.output
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.norm.name, manifest.norm.trained, manifest.positions) == (norm, True, positions)
    assert (manifest.source.name, manifest.source.architecture) == ("mine", "SharpForCausalLM")
    assert manifest.tokenizer.file == "tokenizer.json"
    assert Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).encode("aé").ids == [97, 195, 169]


def test_a_hugging_face_folder_with_a_tokenizer_of_its_own(sharp_export, tmp_path):
    to_hugging_face(tiny_model("softmax", tokenizer="none")).save_pretrained(tmp_path / "words")
    Tokenizer(WordLevel({"one": 0, "two": 1}, unk_token="one")).save(str(tmp_path / "words" / "tokenizer.json"))
    result = sharp_export(tmp_path / "words", "--norm", "softmax", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).encode("two").ids == [1]


def test_graph_is_what_the_design_says(checkpoint, sharp_export, tmp_path):
    sharp_export(checkpoint("ssa", layers=2), "--norm", "ssa", "-o", tmp_path / "out")
    onnx.checker.check_model(str(tmp_path / "out" / "model.onnx"))
    model = onnx.load(tmp_path / "out" / "model.onnx")
    inputs = [value.name for value in model.graph.input]
    assert inputs[:8] == [
        *("input_ids", "positions", "slot_mapping", "block_table", "query_start", "context_lens", "collect_stats"),
        "logits_indices",
    ]
    assert sorted(inputs[8:]) == ["key_cache.0", "key_cache.1", "value_cache.0", "value_cache.1"]
    outputs = [value.name for value in model.graph.output]
    assert outputs[:2] == ["logits", "stats"]
    assert sorted(outputs[2:]) == ["key_cache_out.0", "key_cache_out.1", "value_cache_out.0", "value_cache_out.1"]
    kinds = [(node.domain, node.op_type) for node in model.graph.node]
    assert kinds.count(("ai.sharp", "PagedAttention")) == 2
    assert ("", "RMSNormalization") in kinds
    assert [(function.domain, function.name) for function in model.functions] == [("ai.sharp", "PagedAttention")]
    for node in model.graph.node:
        if node.op_type == "PagedAttention":
            plugin = {
                attribute.name: attribute.s for attribute in node.attribute if attribute.name.startswith("plugin")
            }
            assert plugin == {"plugin_namespace": b"", "plugin_version": b"1"}


@pytest.mark.parametrize("cache", ["paged", "none"])
def test_onnxruntimes_own_quantizer_takes_what_is_exported(checkpoint, sharp_export, tmp_path, cache):
    """ONNX Runtime's own quantizer accepts exported models.

    The quantizer does not update declared shapes of weights, so a model that declares them would not load afterwards.
    It transposes a table that is embedding and head at once for the head alone, so the model has untied weights.
    """
    source = save(tiny("llama", tie_word_embeddings=False), tmp_path / "source")
    result = sharp_export(source, "--norm", "softmax", "--cache", cache, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    graph = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False).graph
    assert not {info.name for info in graph.value_info} & {tensor.name for tensor in graph.initializer}
    quantize_dynamic(tmp_path / "out" / "model.onnx", tmp_path / "int8.onnx", weight_type=QuantType.QInt8)
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(library_path("onnxruntime")))
    onnxruntime.InferenceSession(tmp_path / "int8.onnx", options, providers=["CPUExecutionProvider"])


@pytest.fixture
def hugging_face_folder(tmp_path: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=90,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    folder = tmp_path / "llama"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("norm", ["softmax", full("adaptive-temperature")])
def test_hugging_face_folder(hugging_face_folder, sharp_export, tmp_path, norm):
    result = sharp_export(hugging_face_folder, "--norm", norm, "--untrained-norm", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    manifest = read_manifest(tmp_path / "out")
    assert manifest.norm.trained == (norm == "softmax")
    assert manifest.tokenizer.file is None
    assert manifest.tokenizer.eos_token_ids == (2,)  # a model that reads token ids only also ends its completions there
    assert manifest.source.architecture == "LlamaForCausalLM"
    assert np.isclose(manifest.max_context, 128)


@pytest.mark.parametrize(
    ("generation", "facts", "found"),
    [
        ({"eos_token_id": 0}, {}, (0,)),
        ({"eos_token_id": [5, 0]}, {}, (5, 0)),
        ({}, {"eos_token_id": 0}, (0,)),
        ({}, {"eos_token_id": None, "bos_token_id": None}, ()),
    ],
)
def test_tokens_that_end_a_completion(tmp_path, generation, facts, found):
    model = tiny("llama", **facts)
    model.generation_config = GenerationConfig(**generation)
    config = read_source(save(model, tmp_path / "tiny"), "softmax").model.config
    assert config.eos_token_ids == found
    assert config.bos_token_id == (1 if "bos_token_id" not in facts else None)


def test_how_the_checkpoint_draws_tokens(sharp_export, tmp_path):
    model = tiny("llama")
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.95, repetition_penalty=1.05)
    folder = save(model, tmp_path / "tiny")
    assert sharp_export(folder, "--norm", "softmax", "-o", tmp_path / "exported").exit_code == 0
    manifest = read_manifest(tmp_path / "exported")
    found = manifest.sampling
    assert manifest.sampling_source == "generation_config.json"
    assert found.model_dump(exclude_none=True) == {"temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.05}
    config = folder / "generation_config.json"
    config.write_text(config.read_text().replace("0.95", "95"))
    result = sharp_export(folder, "--norm", "softmax", "-o", tmp_path / "other")
    assert result.exit_code == 2
    assert "generation_config.json: top_p: Input should be less than or equal to 1; correct it" in result.stderr


def test_the_user_says_what_a_model_samples_with(sharp_export, tmp_path):
    model = tiny("llama")
    model.generation_config = GenerationConfig(do_sample=True, top_p=0.95)
    folder = save(model, tmp_path / "tiny")
    chosen = ("--sampling", "temperature=0.2", "--sampling", "top_k=40")
    assert sharp_export(folder, "--norm", "softmax", "-o", tmp_path / "exported", *chosen).exit_code == 0
    manifest = read_manifest(tmp_path / "exported")
    assert manifest.sampling == SamplingDefaults(temperature=0.2, top_p=0.95, top_k=40)
    assert manifest.sampling_source == "--sampling and generation_config.json"
    for given, message in (
        ("heat=1", "--sampling is 'heat=1'; it must be NAME=VALUE, with a name of temperature, top_k"),
        ("temperature=hot", "--sampling is 'temperature=hot'; the value must be a number"),
        ("top_p=2", "--sampling top_p=2: Input should be less than or equal to 1"),
    ):
        result = sharp_export(folder, "--norm", "softmax", "-o", tmp_path / "other", "--sampling", given)
        assert (result.exit_code, message in result.stderr) == (2, True)
    result = sharp_export(save(tiny("bert"), tmp_path / "bert"), "--norm", "softmax", "-o", tmp_path / "b", *chosen)
    assert (result.exit_code, "--sampling is for models that generate text" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("name", "sampling", "source", "line"),
    [
        (
            "tiny",
            SamplingDefaults(),
            None,
            "A server samples with temperature 1, as tiny recommends no temperature; its authors' page may: "
            "--sampling temperature=VALUE",
        ),
        (
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            SamplingDefaults(temperature=0.6, top_k=20),
            "general.sampling of the GGUF file",
            "A server samples with temperature 0.6, top_k 20 (general.sampling of the GGUF file)",
        ),
        (
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            SamplingDefaults(),
            None,
            "A server samples with temperature 1, as SmolLM2-135M-Instruct.Q4_1.gguf recommends no temperature. For "
            "SmolLM2, the model card of HuggingFaceTB/SmolLM2-1.7B-Instruct recommends: --sampling temperature=0.2 "
            "--sampling top_p=0.9",
        ),
    ],
)
def test_an_export_says_what_a_server_will_sample_with(tmp_path, name, sampling, source, line):
    manifest = read_manifest(write_folder(tmp_path / "counting", hashing=0))
    named = manifest.source.model_copy(update={"name": name})
    update = {"sampling": sampling, "sampling_source": source, "source": named}
    assert sampling_line(manifest.model_copy(update=update)) == line


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (
            '{"do_sample": true, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 2]}',
            {"temperature": 0.6, "top_p": 0.9},
        ),
        ('{"top_k": 20, "repetition_penalty": 1.05, "min_p": null}', {"top_k": 20, "repetition_penalty": 1.05}),
        ('{"temperature": 1, "top_k": -1}', {"temperature": 1.0, "top_k": -1}),
        ('{"temperature": Infinity}', "temperature: Input should be a finite number"),
        ('{"repetition_penalty": 1e400}', "repetition_penalty: Input should be a finite number"),
        ('{"temperature": true}', "temperature: Input should be a valid number"),
        ('{"top_k": "50"}', "top_k: Input should be a valid integer"),
        ("[]", "the file: Input should be an object"),
    ],
)
def test_what_is_read_of_generation_config(tmp_path, content, found):
    (tmp_path / "generation_config.json").write_text(content)
    if isinstance(found, dict):
        assert read_sampling(tmp_path).model_dump(exclude_none=True) == found
    else:
        with pytest.raises(InputError, match=found):
            read_sampling(tmp_path)


@pytest.mark.parametrize(
    ("name", "files", "ids"),
    [
        ("gpt2", {"vocab.json": json.dumps({"a": 0, "b": 1, "ab": 2}), "merges.txt": "#version: 0.2\na b"}, [2]),
        ("bert", {"vocab.txt": "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nab"}, [2, 5, 3]),
    ],
)
def test_a_tokenizer_in_the_files_of_older_folders(tmp_path, name, files, ids):
    folder = save(tiny(name), tmp_path / name)
    for file, content in files.items():
        (folder / file).write_text(content)
    source = read_source(folder, "softmax")
    assert source.write_tokenizer is not None
    source.write_tokenizer(tmp_path)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("ab").ids == ids


def test_what_a_killed_export_left_is_removed_by_the_next_one(tmp_path):
    """The next export removes the folder of a killed export.

    Once a folder of the model's size remained forever under a hidden name.
    """
    target = tmp_path / "model"
    leave = (
        "import sys, os; from pathlib import Path; from sharp.exporter.staging import Staging\n"
        "made = Staging(Path(sys.argv[1])); (made.path / 'model.onnx').touch(); print(made.path, flush=True)\n"
        "sys.stdin.read()\n"
    )
    other = tmp_path / ".model.settings"
    other.mkdir()
    (other / "mine").touch()
    command = [sys.executable, "-c", leave, str(target)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            left = Path(process.stdout.readline().strip())
            remove_stale(target)
            assert left.is_dir()  # the export that made the folder still runs
        finally:
            process.kill()
    remove_stale(target)
    assert sorted(tmp_path.iterdir()) == [other]
    running = Staging(target)
    running.publish()
    running.remove()
    assert sorted(tmp_path.iterdir()) == [other, target]


def test_an_empty_folder_that_a_killed_export_left_is_removed_a_minute_later(tmp_path):
    """An empty folder of a killed export is removed a minute later.

    Once such a folder remained forever.
    """
    left = tmp_path / ".model.partial-ab12_xyz"
    left.mkdir()
    remove_stale(tmp_path / "model")
    assert left.is_dir()  # the folder may just have been made
    os.utime(left, (time.time() - 61, time.time() - 61))
    remove_stale(tmp_path / "model")
    assert not left.exists()


def test_folders_that_killed_exports_of_older_versions_left_are_removed_and_no_others(tmp_path):
    target, long_ago = tmp_path / "model", time.time() - 2 * UNLOCKED_SECONDS

    def leave(name, mode=0o700, file="model.onnx", changed=long_ago):
        folder = tmp_path / name
        folder.mkdir(mode=mode)
        (folder / file).touch()
        for path in (folder / file, folder):
            os.utime(path, (changed, changed))
        return folder

    left = leave(".model.ab12_xyz")
    kept = [
        leave(".model.running1", changed=time.time()),
        leave(".model.settings", file="notes.txt"),
        leave(".model.readable", mode=0o755),
        leave(".other.ab12_xyz"),
        leave(".model.longer_name"),
    ]
    remove_stale(target)
    assert not left.exists()
    assert sorted(tmp_path.iterdir()) == sorted(kept)
