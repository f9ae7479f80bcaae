"""Compare greedy decoding of an exported model with transformers on the same weights."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from sharp.core.manifest import Manifest, read_manifest
from sharp.exporter.forms.contiguous.session import ContiguousSession
from sharp.exporter.forms.paged.session import PagedSession
from sharp.exporter.forms.uncached.session import UncachedSession
from tests.exporter.tiny_hugging_face import VARYING, save, tiny

PROMPT = np.array([[5, 17, 30, 44, 8, 61, 72, 19, 3, 88, 12]])
NEW_TOKENS = 12


def export(sharp_export: Any, source: Path, norm: str, cache: str, folder: Path, *options: object) -> Path:
    result = sharp_export(source, "--norm", norm, "--cache", cache, *options, "-o", folder)
    assert result.exit_code == 0, result.output
    return folder


def greedy_of_transformers(model: PreTrainedModel) -> list[int]:
    model.set_attn_implementation("eager")
    output = model.generate(
        torch.from_numpy(PROMPT), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    return output[0, PROMPT.shape[1] :].tolist()


def greedy(folder: Path, cache: str, config: Manifest) -> list[int]:
    if cache == "contiguous":
        return ContiguousSession(folder, kernels=True).generate(PROMPT, NEW_TOKENS)[0].tolist()
    tokens = PROMPT[0].tolist()
    if cache == "none":
        session = UncachedSession(folder, kernels=True)
        for _ in range(NEW_TOKENS):
            tokens.append(int(session.run([np.array([tokens])])[0, -1].argmax()))
    else:
        session = PagedSession(folder, config, read_manifest(folder).cache, kernels=True)
        session.reset(1, len(tokens) + NEW_TOKENS)
        following = np.array(tokens)
        for _ in range(NEW_TOKENS):
            (logits,), _ = session.step([following])
            following = logits[-1:].argmax(-1)
            tokens.append(int(following[0]))
    return tokens[PROMPT.shape[1] :]


def windows_of(config: Any, max_context: int) -> tuple[int, ...]:
    if not getattr(config, "sliding_window", None):
        return ()
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return tuple(config.sliding_window if kind == "sliding_attention" else max_context for kind in types)


def check_greedy_tokens(sharp_export: Any, folder: Path, name: str, cache: str) -> Manifest:
    """Assert that the exported model generates the tokens that transformers generates; return its manifest."""
    # Tracing takes most of the time, so models have one layer, except where layers differ and in one paged case.
    several = name in VARYING or (name, cache) == ("llama", "paged")
    model = tiny(name) if several else tiny(name, num_hidden_layers=1)
    exported = export(sharp_export, save(model, folder / name), "softmax", cache, folder / "out")
    manifest = read_manifest(exported)
    assert (manifest.source.architecture, manifest.cache.form) == (type(model).__name__, cache)
    assert manifest.windows == windows_of(model.config, manifest.max_context)
    assert greedy(exported, cache, manifest) == greedy_of_transformers(model)
    return manifest
