"""Every Hugging Face architecture in every form: what the folder says is what transformers says, token for token."""

import logging

import numpy as np
import pytest
import torch

from sharp.exporter.architectures import ARCHITECTURES
from sharp.exporter.contiguous_session import ContiguousSession
from sharp.exporter.paged_session import PagedSession
from sharp.exporter.uncached_session import UncachedSession
from sharp.plugins.manifest import read_manifest
from tests.exporter.tiny_hugging_face import save, tiny

DECODERS = [name for name, architecture in ARCHITECTURES.items() if architecture.kind == "decoder"]
ENCODERS = [name for name, architecture in ARCHITECTURES.items() if architecture.kind == "encoder"]
PROMPT = np.array([[5, 17, 30, 44, 8, 61, 72, 19, 3, 88, 12]])
NEW_TOKENS = 12


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("torch").setLevel(logging.WARNING)


def export(sharp_export, source, norm, cache, folder, *options):
    result = sharp_export(source, "--norm", norm, "--cache", cache, *options, "-o", folder)
    assert result.exit_code == 0, result.output
    return folder


def greedy_of_transformers(model) -> list[int]:
    model.set_attn_implementation("eager")
    output = model.generate(
        torch.from_numpy(PROMPT), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    return output[0, PROMPT.shape[1] :].tolist()


def greedy(folder, cache: str, config) -> list[int]:
    if cache == "contiguous":
        return ContiguousSession(folder, kernels=True).generate(PROMPT, NEW_TOKENS)[0].tolist()
    tokens = PROMPT[0].tolist()
    if cache == "none":
        session = UncachedSession(folder, kernels=True)
        for _ in range(NEW_TOKENS):
            tokens.append(int(session.run([np.array([tokens])])[0, -1].argmax()))
    else:
        session = PagedSession(folder, config, kernels=True)
        session.reset(1, len(tokens) + NEW_TOKENS)
        following = np.array(tokens)
        for _ in range(NEW_TOKENS):
            (logits,), _ = session.step([following])
            following = logits[-1:].argmax(-1)
            tokens.append(int(following[0]))
    return tokens[PROMPT.shape[1] :]


@pytest.mark.parametrize(
    ("name", "cache"),
    [*((name, cache) for name in DECODERS for cache in ("paged", "contiguous")), ("gemma2", "none"), ("gpt2", "none")],
)
def test_greedy_tokens_equal_transformers(sharp_export, tmp_path, name, cache):
    model = tiny(name)
    folder = export(sharp_export, save(model, tmp_path / name), "softmax", cache, tmp_path / "out")
    manifest = read_manifest(folder)
    assert (manifest.source.architecture, manifest.cache.form) == (type(model).__name__, cache)
    assert manifest.positions == ARCHITECTURES[name].positions
    assert greedy(folder, cache, manifest) == greedy_of_transformers(model)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_equal_transformers(sharp_export, tmp_path, name):
    model = tiny(name)
    folder = export(sharp_export, save(model, tmp_path / name), "softmax", "none", tmp_path / "out")
    manifest = read_manifest(folder)
    assert (manifest.kind, manifest.positions) == ("encoder", "learned")
    names = [port.name for port in manifest.inputs]
    assert ("token_type_ids" in names) == (name == "bert")


@pytest.mark.parametrize(
    ("name", "norm"), [("gemma2", "ssa"), ("gpt2", "entmax"), ("mistral", "ssmax"), ("bert", "ssa")]
)
def test_other_norms(sharp_export, tmp_path, name, norm):
    cache = "none" if name in ENCODERS else "paged"
    folder = export(sharp_export, save(tiny(name), tmp_path / name), norm, cache, tmp_path / "out")
    assert read_manifest(folder).norm.name == norm  # verified against PyTorch with the same window, cap and scale
