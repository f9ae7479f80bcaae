"""Models of the papers' authors' own code compute the numbers in `authors/`, written by `authors/write.py`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sharp.core.errors import InputError
from sharp.core.manifest import read_manifest
from sharp.exporter.checkpoints import authors_models
from sharp.exporter.checkpoints.nano_gpt import is_ssa_nano_gpt
from sharp.exporter.checkpoints.reading import read_source
from sharp.exporter.forms.uncached.session import UncachedSession
from sharp.exporter.sources.decoder import Decoder
from sharp.exporter.sources.uncached_model import UncachedDecoder
from sharp.models.attention import EagerAttention
from tests.exporter.checkpoints.authors.weights import weights
from tests.marks import full

AUTHORS = Path(__file__).parent / "authors"
FILES = ("asentmax", "encoders", "ssa", "gates")
TOLERANCE = 5e-5  # relative to the largest number; another norm, order or scale causes errors above 1e-2


@dataclass(frozen=True)
class Case:
    """A model of the authors' code: its configuration, the shapes of its weights, and its output for `ids`."""

    name: str
    config: dict[str, Any]
    shapes: dict[str, list[int]]
    ids: np.ndarray
    mask: np.ndarray
    output: np.ndarray

    def save(self, folder: Path, **changes: Any) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: torch.from_numpy(value) for name, value in weights(self.shapes).items()}
        if "n_layer" in self.config:  # a checkpoint of the SSA authors' nanoGPT
            own = {**self.config, **changes}
            for layer in range(own["n_layer"]):
                for name in ("a", "n"):
                    tensors[f"transformer.h.{layer}.attn.{name}"].fill_(own[name])
                if own["mask"]:
                    size = own["block_size"]
                    tensors[f"transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, size, size).tril()
            arguments = {
                name: own[name] for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "bias")
            }
            torch.save({"model": tensors, "model_args": arguments, "iter_num": 3}, folder / "ckpt.pt")
            return folder / "ckpt.pt"
        content = {name: value for name, value in (self.config | changes).items() if value is not ...}
        (folder / "config.json").write_text(json.dumps(content))
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder

    def error(self, output: torch.Tensor | np.ndarray) -> float:
        """Return the largest difference at tokens that are not padding, relative to the largest number."""
        expected = self.output.reshape(output.shape)
        difference = np.abs(np.asarray(output) - expected)
        if self.mask.min() == 0 and difference.ndim == 3:
            difference = difference[self.mask.astype(bool)]
        return float(difference.max() / np.abs(expected).max())


def cases_of(file: str) -> dict[str, Case]:
    head, *cases = (json.loads(line) for line in (AUTHORS / f"{file}.jsonl").read_text().splitlines())
    ids = np.array(head["input_ids"])
    mask = np.array(head["padded"]) if file == "encoders" else np.ones_like(ids)
    return {
        case["name"]: Case(
            case["name"],
            {**head["base"], **case["config"]},
            {**head["shapes"], **case["shapes"]},
            ids,
            mask,
            np.array(case["output"]),
        )
        for case in cases
    }


CASES = {name: case for file in FILES for name, case in cases_of(file).items()}


def refused(case: Case) -> bool:
    """Whether Sharp has no norm for a case of the ASEntmax authors' Gemma 2, by their README's configuration."""
    config = case.config
    if config.get("model_type") != "gemma2":
        return False
    sparse, scale = config["entmax_alpha"] > 1, config["attn_scale_type"]
    # a length scale and an adaptive temperature
    two = config["poly_fit"] and not config["use_fast_attn"] and scale is not None
    return two or (sparse and scale == "nakanishi") or (not sparse and scale == "learn")


@torch.no_grad()
def output_of(path: Path, case: Case, norm: str | None = None) -> torch.Tensor:
    source = read_source(path, norm)
    assert source.trained
    assert not any(unused.unknown for unused in source.unused)
    is_decoder = isinstance(source.model, Decoder)
    model = UncachedDecoder(source.model) if is_decoder else source.model
    inputs = [torch.from_numpy(case.ids), *([] if is_decoder else [torch.from_numpy(case.mask)])]
    attention = EagerAttention(model.config, attention_mask=model.attention_mask(*inputs))
    return model.compute(attention, *inputs)


# One case for each branch of the code. The other cases take seconds and run the same branches.
QUICK = (
    *("1-plain-poly-rope", "1.5-adapt-bias-nape", "1-nakanishi-none-fast", "RobertaForMaskedLM-default", "Model-def"),
    *("gate-headwise-bias", "gate-elementwise-plain"),
)
ACCEPTED = [name for name, case in CASES.items() if not refused(case) and not name.startswith("flash")]


@pytest.mark.parametrize("name", [name if any(part in name for part in QUICK) else full(name) for name in ACCEPTED])
def test_a_model_computes_what_the_authors_class_does(tmp_path, name):
    case = CASES[name]
    assert case.error(output_of(case.save(tmp_path), case)) <= TOLERANCE


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if refused(case)])
def test_a_combination_that_no_norm_is_is_refused(tmp_path, name):
    with pytest.raises(InputError, match="which no norm here is"):
        read_source(CASES[name].save(tmp_path), None)


def test_every_combination_that_is_accepted_has_numbers_of_the_authors_class():
    gemmas = [case.config for case in CASES.values() if case.config.get("model_type") == "gemma2"]
    found = {
        (
            (config["attn_scale_type"], config["entmax_alpha"] > 1, config["poly_fit"] and not config["use_fast_attn"]),
            (config["apply_rotary"], config["apply_nape"]),
            config["use_fast_attn"],
            config.get("attn_scale_proj_bias", False),
        )
        for config in gemmas
    }
    accepted = {
        (norm, positions, fast, bias)
        for norm in authors_models.NORMS
        for positions in authors_models.POSITIONS
        for fast in (False, True)
        for bias in ((False, True) if norm[0] == "adapt-softplus-tanh" else (False,))
        if not (fast and norm[2])  # fast attention ignores the temperature
    }
    assert accepted <= found
    classes = {(case.config["architectures"][0]) for case in CASES.values() if "initial_alpha" in case.config}
    assert authors_models.CLASSES.keys() == classes


@pytest.mark.parametrize("name", ["1-nakanishi-poly-rope", "1-adapt-poly-nape"])
def test_the_authors_temperature_works_beside_a_scale_but_with_flash_attention(name):
    plain = CASES[name.replace("-poly", "")].output
    assert np.abs(CASES[name].output - plain).max() > 0.1
    assert np.array_equal(CASES[f"{name}-fast"].output, plain)


# Every kind of model goes through the command. The tests above check the norms.
@pytest.mark.parametrize(
    ("name", "norm", "positions"),
    [
        full("1.5-adapt-bias-nape", "asentmax", "nape"),
        full("1-plain-poly-rope", "adaptive-temperature", "rope"),
        ("slow-n-below-1", "ssa", "learned"),
        full("RobertaForMaskedLM-1.5", "entmax", "learned"),
        full("ModernBertForMaskedLM-default", "entmax", "rope"),
        ("gate-headwise", "softmax", "rope"),
        full("gate-elementwise", "softmax", "rope"),
    ],
)
def test_the_export_computes_what_the_authors_class_does(sharp_export, tmp_path, name, norm, positions):
    case = CASES[name]
    result = sharp_export(case.save(tmp_path / "in"), "--cache", "none", "-o", tmp_path / "out")  # without --norm
    assert result.exit_code == 0, result.output
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.norm.name, manifest.norm.trained, manifest.positions) == (norm, True, positions)
    inputs = [case.ids, case.mask] if manifest.kind == "encoder" else [case.ids]
    assert case.error(UncachedSession(tmp_path / "out", kernels=True).run(inputs)) <= 2 * TOLERANCE


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("1.5-adapt-nape", {"attn_scale_delta": 0.5}, "has attn_scale_delta 0.5, but Sharp has 1 only"),
        ("1.5-plain-rope", {"attn_type": "topk"}, "has attn_type 'topk', but Sharp has 'regular' only"),
        ("1.5-plain-nape", {"apply_rotary": ...}, "has apply_rotary and apply_nape"),
        ("1.5-plain-rope", {"poly_fit": True}, "poly_fit, which is for softmax, with entmax_alpha 1.5"),
        ("1.5-plain-rope", {"entmax_alpha": 0.5}, "entmax_alpha 0.5"),
        ("1-plain-rope", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "has rope_type 'linear'"),
        ("1.5-plain-rope", {"num_attention_heads": ...}, "has num_attention_heads None"),
        ("RobertaForMaskedLM-1.5", {"entmax_alpha": 1.3}, "entmax_alpha 1.3 and initial_alpha 1.5"),
        ("RobertaForSequenceClassification-default", {"initial_alpha": 1.5}, "always computes with 2"),
        ("ModernBertModel-default", {"initial_alpha": 1.5}, "always computes with 2"),
        ("ModernBertForMaskedLM-1.5", {"architectures": ["CustomRobertaForMaskedLM"]}, "correct one of them"),
    ],
)
def test_what_the_authors_class_would_compute_otherwise_is_refused(tmp_path, name, changes, message):
    with pytest.raises(InputError) as refusal:
        read_source(CASES[name].save(tmp_path, **changes), None)
    assert message in str(refusal.value)


def test_a_stock_class_with_initial_alpha_has_its_norm(tmp_path):
    case = CASES["RobertaForMaskedLM-1.5"]
    path = case.save(tmp_path, architectures=["RobertaForMaskedLM"])
    # a --norm that agrees with the configuration is not refused
    assert case.error(output_of(path, case, "entmax")) <= TOLERANCE
    assert not read_source(path, "softmax").trained


def test_entmaxs_alpha_of_an_architecture_without_a_class_of_the_authors_is_refused_with_the_way_out(tmp_path):
    from tests.exporter.tiny_hugging_face import save, tiny

    model = tiny("llama")
    model.config.entmax_alpha = 1.5
    folder = save(model, tmp_path / "llama")
    for norm in ("softmax", "entmax"):
        with pytest.raises(InputError, match=r"'entmax_alpha'.*--trained-norm FILE") as refusal:
            read_source(folder, norm)
        assert "was trained with" not in str(refusal.value)
    (tmp_path / "norm.json").write_text('{"norm": "entmax", "alpha": 1.5}')
    source = read_source(folder, "entmax", trained_norm=tmp_path / "norm.json")
    assert source.trained
    assert source.model.config.alpha == 1.5
    (tmp_path / "norm.json").write_text('{"norm": "entmax", "alpha": 1.7}')
    with pytest.raises(InputError, match="entmax_alpha"):
        read_source(folder, "entmax", trained_norm=tmp_path / "norm.json")


def test_ssa_that_was_never_trained_is_not_exported_as_ssa(tmp_path):
    """A checkpoint of the SSA class that was trained with softmax needs an explicit --norm.

    On PyTorch 2 the authors' class has `flash` on, and then computes softmax attention.
    """
    trained_with_softmax, ssa = CASES["flash-start"], CASES["slow-start"]
    assert trained_with_softmax.error(ssa.output) > 0.1
    path = trained_with_softmax.save(tmp_path)
    with pytest.raises(InputError, match="say --norm softmax, or --norm ssa"):
        read_source(path, None)
    with pytest.raises(InputError, match="say --norm softmax, or --norm ssa"):
        read_source(path, "entmax")
    assert trained_with_softmax.error(output_of(path, trained_with_softmax, "softmax")) <= TOLERANCE
    assert ssa.error(output_of(path, ssa, "ssa")) <= TOLERANCE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content["model"].update({"transformer.h.0.attn.bias": torch.ones(1, 1, 32, 32)}), "mask"),
        (lambda content: content["model"].update({"lm_head.weight": torch.ones(16, 16)}), "lm_head.weight differs"),
        (lambda content: content["model"].update({"lm_head.bias": torch.ones(16)}), "weights has 'lm_head.bias'"),
        (lambda content: content["model_args"].update({"window": 8}), "model_args has 'window'"),
        (lambda content: content.update({"temperature": 2.0}), "the file has 'temperature'"),
    ],
)
def test_what_a_nano_gpt_has_besides_is_refused(tmp_path, change, message):
    path = CASES["slow-learned"].save(tmp_path)
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)
    with pytest.raises(InputError) as refusal:
        read_source(path, None)
    assert message in str(refusal.value)


def test_a_checkpoint_whose_weights_stand_elsewhere_is_no_nano_gpt(tmp_path):
    torch.save({"model_args": {}, "model": 7, "weights": {}}, tmp_path / "model.pt")
    assert not is_ssa_nano_gpt(tmp_path / "model.pt")
