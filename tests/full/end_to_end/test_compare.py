"""`sharp compare` finds errors of readers when it compares with transformers itself and with llama.cpp itself.

The folder, the GGUF file and the files with errors are made from the same model. llama.cpp comes from `make foreign`
(`build/llama_cpp`) or from the environment.
"""

import importlib.util
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sharp.serving.compare.cli import compare

ROOT = Path(__file__).parents[3]
LLAMA_CPP = ROOT / "build" / "llama_cpp"
HEADS, KV_HEADS, VOCABULARY = 4, 2, 400
END, TURN = "<|end|>", "<|turn|>"


def tokenizer_of(text: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, special_tokens=[END, TURN])
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def model_of(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=False,
        **{"bos_token_id": None, "eos_token_id": 0, **changes},
    )
    return LlamaForCausalLM(config)


def hugging_face(folder: Path, text: Path, **changes: object) -> Path:
    model_of(**changes).save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(text.read_text()), eos_token=END)
    tokenizer.save_pretrained(folder)
    return folder


def gguf_file(
    path: Path, text: Path, *, metadata: dict[str, object] | None = None, blocks: bool = False, **changes: object
) -> Path:
    """Write the model as a GGUF file, in the layout of llama.cpp's converter, which pairs rotated rows of q and k.

    With `blocks`, matrices are in Q8_0, else everything is in F32.
    """
    model = model_of(**changes)
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if blocks else gguf.LlamaFileType.ALL_F32)
    file = json.loads(tokenizer_of(text.read_text()).to_str())
    vocabulary = sorted(file["model"]["vocab"], key=file["model"]["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary)
    kinds = (gguf.TokenType.CONTROL, gguf.TokenType.NORMAL)
    writer.add_token_types([kinds[0] if token in (END, TURN) else kinds[1] for token in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in file["model"]["merges"]])
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    for name, value in (metadata or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(name, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        for part, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            if part in name:
                rows = array.reshape(heads, 2, -1, array.shape[1])
                array = rows.swapaxes(1, 2).reshape(array.shape)
        kind = gguf.GGMLQuantizationType.Q8_0 if blocks and array.ndim == 2 else gguf.GGMLQuantizationType.F32
        stored = gguf.quantize(np.ascontiguousarray(array), kind)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def compared(folder: Path, other: Path) -> dict:
    result = CliRunner().invoke(compare, [str(folder), "--with", str(other), "--json", "--device", "cpu"])
    assert result.exit_code in (0, 1), result.output
    found = json.loads(result.stdout)
    assert found["agrees"] == (result.exit_code == 0)
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return hugging_face(tmp_path_factory.mktemp("source") / "llama", ROOT / "LICENSE")


ERRORS = {
    "another model": ({"seed": 1}, "LICENSE", "another model"),
    "RoPE's base": ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, "LICENSE", "RoPE's base"),
    "a second stop token": ({"eos_token_id": [0, 1]}, "LICENSE", "1 ends a completion there and not here"),
    "another tokenizer": ({}, "README.md", "another tokenizer"),
}


def test_transformers_agrees(export, source):
    found = compared(export(source, "softmax"), source)
    assert found["agrees"], found["verdict"]
    assert found["logprobs"]["compared"] > 1000
    assert found["logprobs"]["largest_difference"] < 1e-3
    assert found["not_compared"] == []


@pytest.mark.parametrize("error", ERRORS)
def test_errors_are_found_with_transformers(export, source, tmp_path, error):
    changes, text, words = ERRORS[error]
    found = compared(export(source, "softmax"), hugging_face(tmp_path / "other", ROOT / text, **changes))
    assert words in found["verdict"]


def test_code_of_a_folder_runs_only_if_the_user_says_so(export, source, tmp_path):
    """Code of a folder runs only if the user allows it.

    The folder's class adds 1 to one logit, which shows whether it ran.
    """
    other = hugging_face(tmp_path / "own-code", ROOT / "LICENSE")
    (other / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\n"
        "class Own(LlamaForCausalLM):\n"
        "    def forward(self, *arguments, **options):\n"
        "        found = super().forward(*arguments, **options)\n"
        "        found.logits[..., 7] += 1\n"
        "        return found\n"
    )
    config = json.loads((other / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}, "architectures": ["Own"], "model_type": "own"}
    config["auto_map"]["AutoConfig"] = "modeling_own.OwnConfig"
    (other / "modeling_own.py").write_text(
        "from transformers import LlamaConfig\n"
        "class OwnConfig(LlamaConfig):\n"
        "    model_type = 'own'\n" + (other / "modeling_own.py").read_text() + "Own.config_class = OwnConfig\n"
    )
    (other / "config.json").write_text(json.dumps(config))
    arguments = [str(export(source, "softmax")), "--with", str(other), "--device", "cpu"]
    refused = CliRunner().invoke(compare, arguments)
    assert (refused.exit_code, "add --trust-remote-code to run it" in refused.output) == (2, True), refused.output
    found = CliRunner().invoke(compare, [*arguments, "--trust-remote-code"])
    assert (found.exit_code, "differs: log-probabilities" in found.output) == (1, True), found.output


def test_the_report_of_the_export_says_the_command(export, source):
    folder = export(source, "softmax")
    line = json.loads((folder / "report.json").read_text())["checked_against"]
    assert line == (
        "Checked against PyTorch with transformers' LlamaForCausalLM, from the same reading of llama; no second reader "
        f"has checked that reading (weights, tokenizer, metadata): sharp compare {folder} --with {source}"
    )


@pytest.fixture
def llama_cpp(monkeypatch):
    if LLAMA_CPP.is_dir():
        monkeypatch.setenv("PYTHONPATH", str(LLAMA_CPP))
    elif importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama.cpp is not there; get it with: make foreign")


GGUF_ERRORS = {
    "RoPE's scaling": (
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        "RoPE's base or scaling",
    ),
    "the end of a turn": ({"tokenizer.ggml.eot_token_id": 1}, "1 ends a completion there and not here"),
}


@pytest.mark.parametrize("error", [None, *GGUF_ERRORS])
def test_llama_cpp_agrees_and_its_file_with_an_error_does_not(export, source, tmp_path, llama_cpp, error):
    metadata, words = GGUF_ERRORS[error] if error else ({}, "agrees: ")
    found = compared(export(source, "softmax"), gguf_file(tmp_path / "model.gguf", ROOT / "LICENSE", metadata=metadata))
    assert words in found["verdict"]
    assert found["with"].startswith("llama.cpp (llama-cpp-python ")
    if error is None:
        assert found["logprobs"]["compared"] > 1000
        assert found["logprobs"]["mean_difference"] < 1e-4
        assert found["not_compared"] == []


@pytest.mark.parametrize(("factor", "agrees"), [(1.0, True), (1.02, False)])
def test_quantized_weights_hide_no_factor_of_attention(export, tmp_path, llama_cpp, factor, agrees):
    source = gguf_file(tmp_path / "model.gguf", ROOT / "LICENSE", blocks=True)
    metadata = {"llama.rope.scaling.attn_factor": factor}
    found = compared(
        export(source, "softmax"),
        gguf_file(tmp_path / "other.gguf", ROOT / "LICENSE", blocks=True, metadata=metadata),
    )
    assert (found["agrees"], found["tolerance"]["precision"]) == (agrees, "float32"), found["verdict"]
    assert (found["logprobs"]["mean_difference"] < 1e-4) == agrees


def test_llama_cpp_finds_another_model_and_another_tokenizer(export, source, tmp_path, llama_cpp):
    other = gguf_file(tmp_path / "model.gguf", ROOT / "README.md", seed=1)
    verdict = compared(export(source, "softmax"), other)["verdict"]
    assert "another tokenizer" in verdict
    assert "another model" in verdict


def test_what_llama_cpp_cannot_read_is_one_sentence(export, source, tmp_path, llama_cpp):
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\0\0\0")
    result = CliRunner().invoke(compare, [str(export(source, "softmax")), "--with", str(tmp_path / "model.gguf")])
    assert (result.exit_code, "cannot be read" in result.stderr, result.stderr.count("\n")) == (2, True, 1)
