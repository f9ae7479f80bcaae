"""`--head` chooses the output of an encoder, and the files of sentence-transformers choose its pooling."""

import json

import numpy as np
import onnxruntime
import pytest
import torch
from transformers import AutoModel, BertConfig

from sharp.core.errors import InputError
from sharp.core.manifest import Classification, Embedding, read_manifest
from sharp.exporter.checkpoints.encoder_heads import head_of, longest_text, read_classification, read_embedding
from sharp.exporter.checkpoints.reading import read_source
from sharp.plugins.cuda.kernel_library import register_kernels
from tests.exporter.tiny_hugging_face import tiny
from tests.marks import full
from tests.sentence_encoders import save_encoder, save_sentence_encoder

FLAGS = {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": False, "pooling_mode_lasttoken": False}
TYPES = "sentence_transformers.models."


def write(folder, name, content):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))


def modules(folder, *names):
    paths = {"Pooling": "1_Pooling", "Normalize": "2_Normalize", "Dense": "2_Dense"}
    write(folder, "modules.json", [{"type": TYPES + name, "path": paths.get(name, "")} for name in names])


@pytest.mark.parametrize(
    ("content", "pooling"),
    [
        ({**FLAGS, "pooling_mode_mean_tokens": True}, "mean"),
        ({**FLAGS, "pooling_mode_cls_token": True}, "cls"),
        ({**FLAGS, "pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": ["lasttoken"]}, "last"),
    ],
)
def test_pooling_of_old_and_new_files(tmp_path, content, pooling):
    modules(tmp_path, "Transformer", "Pooling")
    write(tmp_path, "1_Pooling/config.json", content)
    assert read_embedding(tmp_path, BertConfig(hidden_size=48, num_attention_heads=6)) == Embedding(
        size=48, pooling=pooling
    )


def test_without_their_files_it_is_the_mean(tmp_path):
    config = BertConfig(hidden_size=48, num_attention_heads=6, matryoshka_dimensions=[8, 16])
    expected = Embedding(size=48, pooling="mean", normalize=False, matryoshka=True, matryoshka_dimensions=(8, 16))
    assert read_embedding(tmp_path, config) == expected


@pytest.mark.parametrize(
    ("names", "content", "message"),
    [
        (("Transformer", "Pooling"), {"pooling_mode": "max"}, "pools by max"),
        (("Transformer", "Pooling"), {"pooling_mode": ["mean", "cls"]}, "pools by cls and mean"),
        (("Transformer", "Pooling"), FLAGS, "pools by nothing"),
        (("Transformer", "Pooling", "Dense"), {"pooling_mode": "mean"}, "has a module Dense"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, names, content, message):
    modules(tmp_path, *names)
    write(tmp_path, "1_Pooling/config.json", content)
    with pytest.raises(InputError, match=message):
        read_embedding(tmp_path, BertConfig())


def test_a_damaged_file_is_one_sentence(tmp_path):
    (tmp_path / "modules.json").write_text("[")
    with pytest.raises(InputError, match=r"modules\.json cannot be read"):
        read_embedding(tmp_path, BertConfig())


@pytest.mark.parametrize(
    ("architectures", "head"),
    [
        (["BertForMaskedLM"], "masked-lm"),
        (None, "masked-lm"),
        (["BertModel"], "embedding"),
        (["BertForSequenceClassification"], "classification"),
    ],
)
def test_the_head_is_the_one_that_was_saved(tmp_path, architectures, head):
    assert head_of(tmp_path, BertConfig(architectures=architectures)) == head


def test_scores_of_one_label_and_of_others(tmp_path):
    one = BertConfig(num_labels=1)
    assert read_classification(tmp_path, one) == Classification(labels=("LABEL_0",), activation="sigmoid")
    one.sbert_ce_default_activation_function = "torch.nn.modules.linear.Identity"
    assert read_classification(tmp_path, one).activation == "identity"
    assert read_classification(tmp_path, BertConfig(num_labels=2)).activation == "softmax"
    one.sentence_transformers = {"activation_fn": "torch.nn.modules.activation.Tanh"}
    with pytest.raises(InputError, match="scores with Tanh"):
        read_classification(tmp_path, one)


def test_a_gguf_file_has_none_of_their_files(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert longest_text(file, "masked-lm") is None


def test_the_longest_text(tmp_path):
    assert longest_text(tmp_path, "embedding") is None
    write(tmp_path, "tokenizer_config.json", {"model_max_length": 1e30})
    assert longest_text(tmp_path, "embedding") is None
    write(tmp_path, "tokenizer_config.json", {"model_max_length": 512})
    write(tmp_path, "sentence_bert_config.json", {"max_seq_length": 256})
    assert [longest_text(tmp_path, head) for head in ("embedding", "masked-lm")] == [256, None]


@pytest.mark.parametrize("model_type", ["xlm-roberta", full("modernbert")])
def test_hidden_states_are_those_of_transformers(tmp_path, sharp_export, model_type):
    checkpoint = save_sentence_encoder(tmp_path / "encoder", model_type)
    result = sharp_export(checkpoint, "--norm", "softmax", "--cache", "none", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    manifest = read_manifest(tmp_path / "out")
    assert manifest.embedding == Embedding(size=48, pooling="mean", normalize=True)
    assert (manifest.kind, manifest.max_context, manifest.tokenizer.token_types) == ("encoder", 128, False)
    options = onnxruntime.SessionOptions()
    register_kernels(options)
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx", options)
    ids = np.array([[2, 200, 65, 3], [2, 90, 3, 0]])
    mask = (ids > 0).astype(np.int64)
    (found,) = session.run(["hidden_states"], {"input_ids": ids, "attention_mask": mask})
    with torch.no_grad():
        model = AutoModel.from_pretrained(checkpoint, dtype="float32").eval()
        expected = model(torch.tensor(ids), attention_mask=torch.tensor(mask)).last_hidden_state.numpy()
    assert np.abs(found - expected)[mask.astype(bool)].max() < 1e-4


def test_a_masked_language_model_makes_embeddings_when_told(tmp_path, sharp_export):
    tiny("bert").save_pretrained(tmp_path / "bert")
    result = sharp_export(
        tmp_path / "bert", "--norm", "softmax", "--cache", "none", "--head", "embedding", "-o", tmp_path / "out"
    )
    assert result.exit_code == 0, result.output
    assert "place for" not in result.output  # no message about weights of the head that is left out
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.embedding.size, manifest.source.architecture) == (48, "BertModel")


@pytest.mark.parametrize(
    ("head", "message"), [("embedding", "--head is for encoders"), ("classification", "--head is for encoders")]
)
def test_a_decoder_has_no_head(tmp_path, sharp_export, head, message):
    tiny("llama").save_pretrained(tmp_path / "llama")
    result = sharp_export(tmp_path / "llama", "--norm", "softmax", "--head", head, "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert message in result.output


def test_a_classifier_without_its_weights_is_incomplete(tmp_path, sharp_export):
    save_encoder(tmp_path / "bert")
    options = ("--norm", "softmax", "--cache", "none", "--head", "classification", "-o", tmp_path / "out")
    result = sharp_export(tmp_path / "bert", *options)
    assert result.exit_code == 2
    assert "is incomplete" in result.output


SENTENCE_FILES = {
    "a prompt for every text": (
        "config_sentence_transformers.json",
        {"prompts": {"query": "query: "}, "default_prompt_name": "query"},
        "default_prompt_name",
    ),
    "fewer dimensions": ("config_sentence_transformers.json", {"truncate_dim": 16}, "truncate_dim"),
    "a factor": ("config_sentence_transformers.json", {"output_scale": 3.0}, "output_scale"),
    "another activation": ("sentence_bert_config.json", {"config_args": {"hidden_act": "relu"}}, "config_args"),
    "another tokenizer": ("sentence_bert_config.json", {"tokenizer_args": {"do_lower_case": True}}, "tokenizer_args"),
    "prompts that are not pooled": ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt"),
    "pooling by a factor": ("1_Pooling/config.json", {"pooling_scale": 3}, "pooling_scale"),
    "another size": ("1_Pooling/config.json", {"word_embedding_dimension": 32}, "for embeddings of 32 numbers"),
}


@pytest.mark.parametrize(("file", "entries", "said"), SENTENCE_FILES.values(), ids=SENTENCE_FILES)
def test_files_of_sentence_transformers_that_say_what_sharp_does_not_do_are_refused(tmp_path, file, entries, said):
    folder = save_sentence_encoder(tmp_path / "encoder", "xlm-roberta")
    (folder / file).parent.mkdir(exist_ok=True)
    content = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
    (folder / file).write_text(json.dumps(content | entries))
    with pytest.raises(InputError, match=said):
        read_source(folder, "softmax")


@pytest.mark.parametrize(
    ("order", "said"),
    [
        (["Transformer", "Normalize", "Pooling"], "each once, in this order"),
        (["Transformer", "Pooling", "Pooling"], "each once, in this order"),
        (["mine.Transformer", "Pooling"], "whose code is not sentence-transformers' own"),
    ],
    ids=str,
)
def test_modules_in_another_order_or_of_other_code_are_refused(tmp_path, order, said):
    folder = save_sentence_encoder(tmp_path / "encoder", "xlm-roberta")
    kinds = [name if "." in name else f"sentence_transformers.models.{name}" for name in order]
    modules = [{"idx": index, "type": kind, "path": "1_Pooling"} for index, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(InputError, match=said):
        read_source(folder, "softmax")
