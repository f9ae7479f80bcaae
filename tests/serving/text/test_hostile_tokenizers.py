"""Tokenizer files at which the library panics (no `Exception` in Python) or aborts the process are refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sharp.serving.api.errors import EngineError, FieldError, InputError
from sharp.serving.text.tokenizer import Tokenizer

MODEL: dict[str, Any] = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
SPECIAL = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}], "pair": []}
PANICS: dict[str, dict[str, Any]] = {
    "a charsmap that is none": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "a merge of unknown tokens": {
        "model": {**MODEL, "continuing_subword_prefix": "##", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}
    },
    "a special token that is not there": {"post_processor": {**SPECIAL, "special_tokens": {}}},
}


def write(folder: Path, changes: dict[str, Any]) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": MODEL, **changes}))
    return path


@pytest.mark.parametrize("changes", PANICS.values(), ids=PANICS)
def test_a_tokenizer_at_which_the_library_panics_is_refused_with_a_sentence(
    tmp_path: Path, changes: dict[str, Any], capfd: pytest.CaptureFixture[str]
):
    """A tokenizer at which the library panics is refused with one sentence.

    Once it ended in a page of Rust's stack and a PanicException, which no code caught.
    """
    with pytest.raises(InputError, match=r"tokenizer\.json is not a tokenizer file: .*; export the model again"):
        Tokenizer(write(tmp_path, changes))
    assert not capfd.readouterr().err


def test_too_little_memory_to_try_a_file_is_not_the_files_fault(tmp_path: Path):
    """Too little memory to try a tokenizer file is not the file's fault.

    Once a server under `ulimit -v` said that its tokenizer was invalid, and to export the model again.
    """
    ours = "import sys; from pathlib import Path; from sharp.core.tokenizer_trial import check_tokenizer_file as check"
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**26, 2**26)); check(Path(sys.argv[1]))"
    script = f"{ours}; {limit}"
    path = write(tmp_path, {})
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, timeout=60, check=False)
    assert f"{path} cannot be tried: this process may take 64 MB of address space" in done.stderr


def test_a_panic_at_a_prompt_is_an_error_of_that_prompt(tmp_path: Path):
    changes = {"model": {"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0]]}}
    tokenizer = Tokenizer(write(tmp_path, changes))
    assert tokenizer.encode("aa") == [0, 0]
    with pytest.raises(FieldError, match=r"the model's tokenizer fails at prompt: .*; change it"):
        tokenizer.encode("b")


def test_a_decoder_that_panics_does_not_end_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tokenizer = Tokenizer(write(tmp_path, {}))
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})

    class Panicking:
        def decode(self, *_: object, **__: object) -> str:
            raise panic("no entry found for key")

    monkeypatch.setattr(tokenizer, "_tokenizer", Panicking())
    with pytest.raises(EngineError, match="the model's tokenizer fails at the tokens of a text: no entry found"):
        tokenizer.decode([0])
