"""The readers: every function of Sharp that reads a file from someone else, and a whole sample for each."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFWriter, TokenType

from sharp.core.engine_manifest import (
    ENGINE_FILE,
    EngineLimits,
    EngineManifest,
    manifest_path,
    read_engine_manifest,
)
from sharp.core.manifest import read_manifest
from sharp.exporter.checkpoints.reading import read_source
from sharp.models.checkpoint import read_checkpoint, save_checkpoint
from sharp.models.hugging_face import to_hugging_face
from sharp.models.temperature_preset import TemperaturePreset, read_temperature
from tests.exporter.conftest import tiny_model
from tests.exporter.tiny_hugging_face import save, tiny


@dataclass(frozen=True)
class Reader:
    """A reader of files.

    `make` writes a whole sample into an empty folder, `file` is the part of the sample that is damaged, and `read`
    reads the folder.
    """

    name: str
    make: Callable[[Path], object]
    file: str
    read: Callable[[Path], object]


def own_checkpoint(suffix: str) -> Reader:
    """Return the reader of Sharp's checkpoints with a suffix."""
    file = f"tiny{suffix}"
    return Reader(
        f"checkpoint{suffix}",
        lambda folder: save_checkpoint(folder / file, tiny_model("ssa")),
        file,
        lambda folder: read_checkpoint(folder / file),
    )


def own_folder(file: str) -> Reader:
    """Return the reader of a file in Sharp's Hugging Face folder."""
    return Reader(
        f"own-folder-{file}",
        lambda folder: to_hugging_face(tiny_model("ssa")).save_pretrained(folder),
        file,
        lambda folder: read_source(folder, "ssa"),
    )


def llama_folder(file: str) -> Reader:
    """Return the reader of a file in a Llama's Hugging Face folder with three shards."""

    def make(folder: Path) -> None:
        save(tiny("llama"), folder)
        tiny("llama").save_pretrained(folder, max_shard_size="60KB")
        (folder / "model.safetensors").unlink()

    return Reader(f"llama-{file}", make, file, lambda folder: read_source(folder, "softmax"))


def write_gguf(folder: Path, described_width: int = 48) -> None:
    """Write a Llama of one layer with a tokenizer as GGUF; its header claims `described_width`, which may be wrong."""
    hidden, heads, wide, tokens = 32, 2, 48, [*(chr(33 + i) for i in range(90)), "ab", "<s>", "</s>"]
    writer = GGUFWriter(folder / "tiny.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(described_width)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.NORMAL] * 91 + [TokenType.CONTROL] * 2)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(91)
    writer.add_eos_token_id(92)
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (len(tokens), hidden), "output_norm": (hidden,), "output": (len(tokens), hidden)}
    shapes |= {f"blk.0.{name}": (hidden, hidden) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
    shapes |= {"blk.0.ffn_gate": (wide, hidden), "blk.0.ffn_up": (wide, hidden), "blk.0.ffn_down": (hidden, wide)}
    shapes |= {"blk.0.attn_norm": (hidden,), "blk.0.ffn_norm": (hidden,)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape, np.float32) * 0.1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_preset(folder: Path) -> None:
    """Write the preset of an adaptive temperature."""
    TemperaturePreset(
        temperature_coefficients=(-0.037, 0.481, -2.3, 4.917, -1.791),
        entropy_range=(0.5, 5.0),
        source="tiny",
        data="sets",
        date="2026-11-21",
        samples=100,
    ).write(folder / "preset.json")


def write_model_folder(folder: Path) -> None:
    """Write the files of an export that are read before a runtime opens the model: the manifest and the graph."""
    from sharp.exporter.export import ExportSettings, export

    save_checkpoint(folder / "tiny.safetensors", tiny_model("softmax"), torch.float32)
    export(
        folder / "tiny.safetensors",
        ExportSettings(norm="softmax", cache="none"),
        folder / "model",
        lambda _name, _steps: lambda: None,
        lambda _source: None,
    )


def model_folder(file: str) -> Reader:
    """Return the reader of a file in an exported model folder."""
    return Reader(f"model-{file}", write_model_folder, f"model/{file}", lambda folder: read_manifest(folder / "model"))


def write_engine_manifest(folder: Path) -> None:
    """Write the manifest that lies beside an engine of `sharp build`."""
    shapes = {"input_ids": ((1,), (4,), (8,)), "block_table": ((1, 1), (2, 2), (4, 4))}
    manifest = EngineManifest(
        backend="TensorRT",
        version="10.14.1",
        compute_capability=None,
        sha256="0" * 64,
        model="tiny",
        model_sha256="0" * 64,
        limits=EngineLimits(sequences=4, tokens=8, context=64),
        plugin="libsharp_trt.so",
        profiles=(shapes,),
    )
    manifest_path(folder / ENGINE_FILE).write_text(manifest.model_dump_json(indent=2), encoding="utf-8")


READERS = (
    own_checkpoint(".safetensors"),
    own_checkpoint(".pt"),
    own_folder("config.json"),
    own_folder("generation_config.json"),
    own_folder("model.safetensors"),
    own_folder("tokenizer.json"),
    llama_folder("config.json"),
    llama_folder("model.safetensors.index.json"),
    llama_folder("model-00001-of-00003.safetensors"),
    Reader("gguf", write_gguf, "tiny.gguf", lambda folder: read_source(folder / "tiny.gguf", "softmax")),
    Reader("preset", write_preset, "preset.json", lambda folder: read_temperature(str(folder / "preset.json"))),
    model_folder("sharp.json"),
    model_folder("model.onnx"),
    Reader(
        "engine", write_engine_manifest, "model.engine.json", lambda folder: read_engine_manifest(folder / ENGINE_FILE)
    ),
)
