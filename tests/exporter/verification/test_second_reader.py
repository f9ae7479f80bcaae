"""The line of a report that says which readings of a checkpoint no second program has confirmed."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from sharp.exporter.sources.decoder import Decoder
from sharp.exporter.sources.source import Source
from sharp.exporter.sources.uncached_model import UncachedModel
from sharp.exporter.verification.second_reader import checked_against

FOLDER = Path("out/model")
UNSEEN = "no second reader has checked that reading (weights, tokenizer, metadata): "


def model(norm, kind=Decoder):
    return Mock(spec=kind, config=Mock(norm=norm), norm_name=norm)


def source(norm="softmax", trained="softmax", *, kind=Decoder, architecture="LlamaForCausalLM", tokenizer=True):
    made = model(norm, kind)
    return Source(
        "model",
        architecture,
        "",
        made,
        made if norm == trained else model(trained, kind),
        Mock() if tokenizer else None,
    )


def line(path, given, *, program=False, cache="paged"):
    return checked_against(Path(path), given, FOLDER, program=program, cache=cache)


@pytest.fixture
def hugging_face(tmp_path):
    def write(**config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


def test_a_gguf_file():
    assert line("a b.gguf", source()) == (
        "Checked against PyTorch with transformers' LlamaForCausalLM, from the same reading of a b.gguf; "
        f"{UNSEEN}sharp compare out/model --with 'a b.gguf'"
    )


def test_a_hugging_face_folder_and_one_with_code(hugging_face):
    folder = hugging_face(model_type="llama")
    assert line(folder, source()).endswith(f"{UNSEEN}sharp compare out/model --with {folder}")
    folder = hugging_face(model_type="gemma2", auto_map={"AutoModelForCausalLM": "own.Own"})
    found = line(folder, source("entmax", "entmax"))
    assert "LlamaForCausalLM with entmax in its attention" in found
    assert found.endswith(f"sharp compare out/model --with {folder} --trust-remote-code")


@pytest.mark.parametrize(
    ("given", "cache", "end"),
    [
        (source("entmax"), "paged", "export it with --norm softmax, and run sharp compare on that: "),
        (source("ssa", "ssa"), "paged", "no other program is known to compute ssa"),
        (source(), "contiguous", "export it with --cache paged, and run sharp compare on that: "),
        (source(tokenizer=False), "paged", "sharp compare needs a tokenizer, and there is none"),
        (source(kind=UncachedModel), "none", "sharp compare reads decoders only"),
    ],
)
def test_what_cannot_be_compared_as_it_is(hugging_face, given, cache, end):
    assert UNSEEN + end in line(hugging_face(model_type="llama"), given, cache=cache)


def test_what_no_other_program_reads(tmp_path):
    (tmp_path / "own.safetensors").touch()
    own = line(tmp_path / "own.safetensors", source("ssa", "ssa", architecture="SharpForCausalLM"))
    assert own.endswith("no second reader has checked the reading of the file, as only Sharp reads such files")
    program = line("model.pt2", source(), program=True)
    assert "with the program's own operators" in program
    assert "sharp compare" not in own + program
    (tmp_path / "nano.pt").touch()
    authors = line(tmp_path / "nano.pt", source("ssa", "ssa", architecture="GPT2LMHeadModel"))
    assert authors.endswith(f"{UNSEEN}no other program reads such a file")
