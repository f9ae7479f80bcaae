"""Modules that were not written for Sharp: their attention is recognised, and the exported models agree with them."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sharp
from sharp.core.errors import InputError
from sharp.exporter.module import check_traced, evaluated, trace
from sharp.exporter.programs.reading import ProgramOptions, read_program
from sharp.models.normalized_attention import normalized_attention
from tests.exporter.programs import gpt

VOCABULARY, WIDTH, HEADS = 97, 32, 4
TOKENS = torch.arange(18).reshape(2, 9)
HIDDEN, MEMORY = torch.randn(2, 9, WIDTH), torch.randn(2, 5, WIDTH)

Made = tuple[nn.Module, tuple[Tensor, ...]]


def x_transformers(**options: Any) -> Made:
    library = pytest.importorskip("x_transformers")
    layers = library.Decoder(dim=WIDTH, depth=2, heads=HEADS, attn_dim_head=8, **options)
    return library.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=64, attn_layers=layers), (TOKENS,)


def litgpt(name: str, **changes: Any) -> Made:
    library = pytest.importorskip("litgpt")
    sizes = {"block_size": 64, "n_layer": 2, "n_embd": WIDTH, "n_head": HEADS, "intermediate_size": 64}
    vocabulary = {"vocab_size": VOCABULARY, "padded_vocab_size": VOCABULARY}
    return library.GPT(library.Config.from_name(name, **(sizes | vocabulary | changes))), (TOKENS,)


def torchtune(name: str, **options: Any) -> Made:
    pytest.importorskip("torchtune")
    library = importlib.import_module(f"torchtune.models.{name}")
    sizes = {"vocab_size": VOCABULARY, "num_layers": 2, "num_heads": HEADS, "embed_dim": WIDTH}
    build = getattr(library, name)
    return build(**sizes, max_seq_len=64, intermediate_dim=64, **{"num_kv_heads": 2} | options), (TOKENS,)


def timm(name: str, **options: Any) -> Made:
    library = pytest.importorskip("timm")
    sizes = {"img_size": 16, "embed_dim": WIDTH, "num_classes": 10}
    return getattr(library.models, name)(**sizes, **options), (torch.randn(2, 3, 16, 16),)


VIT = {"patch_size": 4, "depth": 2, "num_heads": HEADS}


class TorchDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, 64, batch_first=True), 2)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layers(x, memory, tgt_mask=mask, tgt_is_causal=True)


class TorchTransformer(nn.Module):
    """A module with an encoder and a decoder: layers over different tokens, and cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Transformer(WIDTH, HEADS, 2, 2, 64, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.layers(source, target, tgt_mask=mask, tgt_is_causal=True)


class TorchEncoder(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=batch_first), 2, enable_nested_tensor=False
        )

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.layers(x, src_key_padding_mask=padding)


class TorchLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True), 2)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.layers(self.tokens(ids), mask=mask, is_causal=True))


DECODERS: dict[str, Callable[[], Made]] = {
    "x-transformers": x_transformers,
    "x-transformers, flash": lambda: x_transformers(attn_flash=True),
    "x-transformers, rotary": lambda: x_transformers(rotary_pos_emb=True),
    "x-transformers, grouped": lambda: x_transformers(attn_kv_heads=2, attn_flash=True, rotary_pos_emb=True),
    "x-transformers, one KV head": lambda: x_transformers(attn_one_kv_head=True),
    "x-transformers, normalized": lambda: x_transformers(attn_qk_norm=True),
    "x-transformers, capped": lambda: x_transformers(attn_softclamp_logits=True),
    "x-transformers, gated": lambda: x_transformers(attn_gate_values=True),
    "litgpt pythia": lambda: litgpt("pythia-14m"),
    "litgpt llama": lambda: litgpt("Llama-3.2-1B", n_query_groups=2),
    "litgpt gemma": lambda: litgpt("Gemma-2b", n_query_groups=1, head_size=8),
    "litgpt phi": lambda: litgpt("phi-2"),
    "litgpt qwen3": lambda: litgpt("Qwen3-0.6B", n_query_groups=2, head_size=8),
    "torch": lambda: (TorchLanguageModel(), (TOKENS,)),
    "torchtune llama3": lambda: torchtune("llama3"),
    "torchtune qwen2": lambda: torchtune("qwen2"),
    "torchtune phi3": lambda: torchtune("phi3"),
    "torchtune gemma": lambda: torchtune("gemma", num_kv_heads=1, head_dim=8),
    "torchtune gemma2": lambda: torchtune("gemma2", head_dim=8, sliding_window_size=16),
}
OTHERS: dict[str, Callable[[], Made]] = {
    "torch encoder": lambda: (TorchEncoder(batch_first=False), (HIDDEN,)),
    "torch encoder with padding": lambda: (TorchEncoder(batch_first=True), (HIDDEN, torch.zeros(2, 9).bool())),
    "torch encoder and decoder": lambda: (TorchTransformer(), (HIDDEN, MEMORY)),
    "torch decoder": lambda: (TorchDecoder(), (HIDDEN, MEMORY)),
    "timm ViT": lambda: timm("VisionTransformer", **VIT),
    "timm EVA": lambda: timm("Eva", use_rot_pos_emb=True, **VIT),
    "timm CaiT": lambda: timm("Cait", **VIT),
    "x-transformers, ALiBi": lambda: x_transformers(alibi_pos_bias=True),
    "x-transformers, shifted tokens": lambda: x_transformers(shift_tokens=1),
    "litgpt gemma 2": lambda: litgpt("Gemma-2-2b", n_query_groups=2, head_size=8, sliding_window_size=4),
}
SWIN = {"patch_size": 2, "depths": (2,), "num_heads": (HEADS,), "window_size": 4}
REFUSED: dict[str, tuple[Callable[[], Made], str]] = {
    "x-transformers, T5 bias": (lambda: x_transformers(rel_pos_bias=True), "bias that is not ALiBi's"),
    "timm Swin": (lambda: timm("SwinTransformer", **SWIN), "bias that is not ALiBi's"),
    "x-transformers, top-k": (lambda: x_transformers(attn_sparse_topk=4), "does something to its logits"),
    "x-transformers, memory keys": (lambda: x_transformers(attn_num_mem_kv=2), "none that Sharp knows"),
}
FORMS = [("contiguous", "softmax"), ("none", "entmax"), ("paged", "ssmax")]
EVERY_FORM = ("x-transformers, grouped", "litgpt gemma", "torch")
# An export takes ten seconds, so each of the other modules has one norm, and together they have all norms.
NORMS = ("ssa", "entmax", "adaptive-temperature", "softmax", "sparsemax", "sigmoid", "relu", "relu2")
CASES = [(name, "paged", NORMS[number % len(NORMS)]) for number, name in enumerate(DECODERS)] + [
    (name, *form) for name in EVERY_FORM for form in FORMS
]
OTHER_CASES = [(name, NORMS[number % len(NORMS)]) for number, name in enumerate(OTHERS)]


@pytest.mark.parametrize(("name", "cache", "norm"), CASES)
def test_a_decoder_is_written(name: str, cache: str, norm: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, inputs = DECODERS[name]()
    result = sharp.export(module, inputs, norm=norm, cache=cache, untrained_norm=True, output=tmp_path / "model")
    assert result.verification.passed
    assert result.manifest.kind == "decoder"


@pytest.mark.parametrize(("name", "norm"), OTHER_CASES)
def test_others_are_written_over_whole_sequences(name: str, norm: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, inputs = OTHERS[name]()
    result = sharp.export(module, inputs, norm=norm, cache="none", untrained_norm=True, output=tmp_path / "model")
    assert result.verification.passed
    with pytest.raises(InputError, match="cannot have a cache"):
        sharp.export(module, inputs, norm=norm, untrained_norm=True, output=tmp_path / "other")


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_op_has_not_is_refused(name: str) -> None:
    made, reason = REFUSED[name]
    module, inputs = made()
    with evaluated(module):
        exported = trace(module, inputs)
        check_traced(module, exported, inputs)
    with pytest.raises(InputError, match=reason):
        read_program(Path(name), "softmax", given=ProgramOptions(exported=exported))


def test_a_saved_program_that_calls_the_op_is_read_by_a_new_process(tmp_path: Path) -> None:
    path = tmp_path / "named.pt2"
    module = gpt.GPT(partial(normalized_attention, causal=True))
    with evaluated(module):
        torch.export.save(trace(module, (TOKENS,)), path)
    command = [str(Path(sys.executable).parent / "sharp-export"), str(path), "--norm", "softmax", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "deserializ" not in done.stderr
