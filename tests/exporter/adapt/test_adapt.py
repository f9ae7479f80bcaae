"""`sharp adapt` on tiny models: the result is exported as trained, loads in transformers, and a run can be resumed."""

import errno
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner, Result
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

import sharp.models.hugging_face  # noqa: F401 - teaches transformers the model type
from sharp.core.errors import InputError
from sharp.core.manifest import read_manifest
from sharp.exporter.adapt import adapt as module
from sharp.exporter.adapt import budget, measurement, rates, speed, state, training
from sharp.exporter.adapt.adapt import adapt
from sharp.exporter.adapt.budget import measured_length
from sharp.exporter.adapt.cli import adapt as command
from sharp.exporter.adapt.recipe import Recipe
from sharp.exporter.adapt.settings import AdaptSettings
from sharp.exporter.adapt.student import Student, make_student
from sharp.exporter.checkpoints.reading import read_source
from sharp.exporter.sources.norm_options import NormOptions
from sharp.models.adapted_model import attention_norms
from sharp.plugins.op.attributes import TEMPERATURE_PRESETS
from sharp.plugins.op.torch_normalizers import attention_weights, entropy
from tests.exporter.adapt.conftest import TEXT
from tests.full.fuzz.readers import write_gguf
from tests.marks import full


def settings(text: Path, norm: str = "entmax", **changes: object) -> AdaptSettings:
    fields = {"norm": norm, "text": (text,), "held_out": text, "length": 24, "tokens": 24 * 8, "rank": 4}
    fields["dtype"] = "float32"  # whatever dtype this processor would choose
    return AdaptSettings(**{**fields, **changes})


def run(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments], prog_name="sharp adapt")


def test_a_model_is_adapted_exported_as_trained_and_generates_the_same_tokens(
    teacher, text: Path, tmp_path: Path, sharp_export
) -> None:
    folder = tmp_path / "student"
    result = run(
        teacher(), "--norm", "entmax", "--text", text, "--length", 24, "--tokens", 240, "--keep-adapter", "-o", folder
    )
    assert result.exit_code == 0, result.output
    assert not folder.with_name("student.partial").exists()
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()
    assert "SHA-256" in (folder / "README.md").read_text()
    report = json.loads((folder / "report.json").read_text())
    assert report["student"]["mean_support"] < 1 == report["teacher_figures"]["mean_support"]
    assert "<h2>Perplexity</h2>" in (folder / "report.html").read_text()

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "LlamaForCausalLM"
    exported = sharp_export(folder, "-o", tmp_path / "exported")  # neither --norm nor --untrained-norm is needed
    assert exported.exit_code == 0, exported.output
    manifest = read_manifest(tmp_path / "exported")
    assert manifest.norm.name == "entmax" and manifest.norm.trained and manifest.verified
    assert manifest.source.architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("norm", "model_type"),
    [
        ("asentmax", "gpt2"),
        ("ssa", "qwen3"),
        full("sentmax", "gpt_neox"),
        full("adaptive-temperature", "gemma2"),
        full("ssmax", "mistral"),
        full("assmax", "olmo2"),
        full("ssa", "afmoe"),
        full("entmax", "qwen3_next"),
        full("ssa", "diffllama"),
    ],
)
def test_every_norm_and_kind_of_projection(teacher, text: Path, tmp_path: Path, norm: str, model_type: str) -> None:
    folder = tmp_path / "student"
    report = adapt(teacher(model_type), settings(text, norm, tokens=24 * 4), folder)
    assert report is not None and math.isfinite(report["student"]["unlike"]["perplexity"])
    source = read_source(folder, norm)  # read_source compares the eager definition with transformers' own run
    assert source.trained
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.arange(3, 20)[None]
    expected = source.model.own_logits(ids)
    torch.testing.assert_close(model(ids).logits, expected)


def test_generation_with_a_cache_and_padding_is_that_without(teacher, text: Path, tmp_path: Path) -> None:
    adapt(teacher(), settings(text, "asentmax", tokens=24 * 4), tmp_path / "student")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "student").eval()
    ids = torch.arange(3, 15)[None]
    made = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    for end in range(ids.shape[1], made.shape[1]):
        assert model(made[:, :end], use_cache=False).logits[0, -1].argmax() == made[0, end]
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), ids], 1)
    mask = (torch.arange(15) >= 3).long()[None]
    again = model.generate(padded, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert again[0, 15:].tolist() == made[0, 12:].tolist()


def test_the_adapter_is_one_that_peft_loads(teacher, text: Path, tmp_path: Path) -> None:
    path, folder = teacher(), tmp_path / "student"
    adapt(path, settings(text, keep_adapter=True, calibrate="no"), folder)
    base = AutoModelForCausalLM.from_pretrained(path)
    merged = PeftModel.from_pretrained(base, folder / "adapter").merge_and_unload().state_dict()
    before, written = (load_file(path / "model.safetensors") for path in (path, folder))
    for name in before:
        if ".q_proj." not in name:  # the query weights also contain the factors of the heads
            torch.testing.assert_close(merged[name], written[name])
        assert (".self_attn." in name) == (not torch.equal(merged[name], before[name])), name


def test_activations_that_are_computed_again_change_no_gradient(teacher, monkeypatch) -> None:
    path = teacher()

    def gradients_of(length: int) -> tuple[int, list[Tensor | None]]:
        monkeypatch.setattr(training, "CHECKPOINTED_LENGTH", length)
        student = make_student(path, "entmax", NormOptions(), 4, None, 24, 0)
        kept = []

        def keep(one: Tensor) -> Tensor:
            kept.append(one.numel())
            return one

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
            training.train_step(student, torch.arange(48).view(2, 24))
        return sum(kept), [parameter.grad for parameter in student.learned().values()]

    whole, expected = gradients_of(2048)
    checkpointed, gradients = gradients_of(24)
    assert checkpointed < whole / 2
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("norm", "dtype"), [("entmax", "float32"), ("entmax", "bfloat16"), full("ssa", "float32")])
def test_a_run_that_is_killed_and_resumed_gives_the_same_weights(
    teacher, text: Path, tmp_path: Path, norm: str, dtype: str
) -> None:
    path, chosen = teacher(), settings(text, norm, dtype=dtype)
    adapt(path, chosen, tmp_path / "whole")
    assert adapt(path, chosen, tmp_path / "killed", stop_after=3) is None
    assert not (tmp_path / "killed").exists()
    adapt(path, chosen, tmp_path / "killed")
    whole, killed = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert whole.keys() == killed.keys()
    assert all(torch.equal(whole[name], killed[name]) for name in whole)


def launched(processes: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += ["--module", "sharp.exporter.adapt", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.full
@pytest.mark.parametrize("stage", ["short", "long"])
def test_two_processes_learn_what_one_does(teacher, text: Path, tmp_path: Path, stage: str) -> None:
    shared = (teacher(), "--norm", "entmax", "--text", text, "--length", 24, "--tokens", 24 * 16, "--batch", 2)
    shared += ("--stage", "long") * (stage == "long")
    alone = run(*shared, "-o", tmp_path / "1")
    assert alone.exit_code == 0, alone.output
    done = launched(2, *shared, "-o", tmp_path / "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("The model is in") == 1
    reports = [json.loads((tmp_path / name / "report.json").read_text()) for name in ("1", "2")]
    assert [report["processes"] for report in reports] == [1, 2]
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("1", "2"))
    for name in one if stage == "short" else ():  # one process trains on fewer long sequences than two
        torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=1e-4)


def test_a_batch_is_the_same_for_every_process(teacher, text: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "join", lambda device: (SimpleNamespace(count=2), device))
    refused = run(teacher(), "--norm", "entmax", "--text", text, "--batch", 3, "-o", tmp_path / "refused")
    assert refused.exit_code and "must be a multiple of the 2 processes" in refused.output


@pytest.mark.parametrize(
    ("found", "expected"),
    [({"avx512_bf16": True, "amx_bf16": False}, "bfloat16"), ({"amx_bf16": True}, "bfloat16"), ({}, "float32")],
)
def test_products_are_in_bfloat16_where_the_processor_has_instructions_for_them(
    teacher, text: Path, tmp_path: Path, monkeypatch, found: dict[str, bool], expected: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    folder = tmp_path / "student"
    report = adapt(teacher(), settings(text, dtype="auto", tokens=24 * 4), folder)
    assert report is not None and report["recipe"]["dtype"] == expected
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.float32}


def test_bfloat16_learns_what_float32_does(teacher, text: Path, tmp_path: Path) -> None:
    path = teacher()
    reports = [
        adapt(path, settings(text, dtype=dtype, tokens=24 * 40, calibrate="no"), tmp_path / dtype)
        for dtype in ("float32", "bfloat16")
    ]
    raw, whole, half = (
        reports[index][name]["unlike"]["perplexity"] for index, name in ((0, "raw"), (0, "student"), (1, "student"))
    )
    assert half == pytest.approx(whole, abs=0.1 * abs(raw - whole))
    assert half != whole


def test_a_run_with_other_settings_is_not_resumed(teacher, text: Path, tmp_path: Path) -> None:
    path = teacher()
    adapt(path, settings(text), tmp_path / "student", stop_after=1)
    result = run(path, "--norm", "entmax", "--text", text, "--length", 32, "-o", tmp_path / "student")
    assert result.exit_code == 2 and "holds a run with other settings" in result.output
    other = tmp_path / "other.txt"
    other.write_text(TEXT[:3000])
    # otherwise the reports of two texts would be compared
    with pytest.raises(InputError, match="holds a run with other settings"):
        adapt(path, settings(text, held_out=other), tmp_path / "student")


def test_a_damaged_state_is_one_sentence(teacher, text: Path, tmp_path: Path) -> None:
    path = teacher()
    adapt(path, settings(text), tmp_path / "student", stop_after=1)
    (tmp_path / "student.partial" / "before.json").write_text("")
    with pytest.raises(InputError, match="is damaged; remove the folder"):
        adapt(path, settings(text), tmp_path / "student")


def test_a_users_folder_in_the_place_of_the_state_stays(teacher, text: Path, tmp_path: Path) -> None:
    notes = tmp_path / "student.partial" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    with pytest.raises(InputError, match="is something else"):
        adapt(teacher(), settings(text, tokens=24), tmp_path / "student")
    assert notes.read_text() == "mine"


def test_what_a_run_left_that_was_killed_while_it_wrote_is_removed(teacher, text: Path, tmp_path: Path) -> None:
    left = tmp_path / ".student.partial-abcd1234"
    left.mkdir()
    (left / "model.safetensors").touch()
    adapt(str(teacher()), settings(text, tokens=24), str(tmp_path / "student"))
    assert (tmp_path / "student").is_dir() and not left.exists()


def test_figures_that_a_run_with_other_settings_left_are_measured_again(teacher, text: Path, tmp_path: Path) -> None:
    path, folder = teacher(), tmp_path / "student"
    adapt(path, settings(text), folder, stop_after=1)
    partial = tmp_path / "student.partial"
    (partial / "state.safetensors").unlink()  # as if the run was killed before it saved the first state
    report = adapt(path, settings(text, "ssa", length=32), folder)
    fresh = adapt(path, settings(text, "ssa", length=32), tmp_path / "fresh")
    assert report is not None and fresh is not None
    for name in ("teacher_figures", "raw"):
        assert report[name]["unlike"]["perplexity"] == fresh[name]["unlike"]["perplexity"]


def test_a_short_text_has_a_held_out_part(teacher, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text(TEXT[:9000])
    report = adapt(teacher(), settings(short, tokens=24), tmp_path / "student")
    assert report is not None and report["student"]["held_out"]["tokens"] >= 24


def test_the_long_stage_ends_at_the_models_context(teacher, text: Path, tmp_path: Path) -> None:
    longer = teacher(max_position_embeddings=512)
    report = adapt(longer, settings(text, stage="long", tokens=24 * 48), tmp_path / "student")
    assert report is not None
    assert (report["recipe"]["long_steps"], report["recipe"]["long_length"]) == (1, 512)
    for model in ("teacher_figures", "raw", "student"):
        assert report[model]["held_out"]["by_position"][-1]["to"] == 512


def test_perplexity_is_measured_as_far_as_requested(teacher, text: Path, tmp_path: Path) -> None:
    report = adapt(teacher(), settings(text, tokens=24, measure_length=100), tmp_path / "student")
    assert report is not None and report["student"]["unlike"]["by_position"][-1]["to"] == 100


def test_positions_go_as_far_as_two_fifths_of_the_training_allow() -> None:
    texts = (25_000, 2_400)
    lengths = [measured_length(Recipe(steps, 256, 1), 8192, texts) for steps in (1, 60, 240, 400)]
    assert lengths == [1024, 1024, 4096, 8192]  # 400 steps take 13 minutes on two idle cores
    assert measured_length(Recipe(400, 256, 1), 8192, (25_000, 25_000)) == 4096
    assert measured_length(Recipe(1, 256, 1), 512, texts) == 512
    # a length that the model is trained on is measured
    assert measured_length(Recipe(1, 256, 1, 1, 4096), 8192, texts) == 4096
    assert measured_length(Recipe(10**6, 256, 1), 6000, texts) == 6000


def test_by_default_positions_go_on_to_the_models_context(teacher, text: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(budget, "MEASURED_SHARE", 1000)
    path = teacher(max_position_embeddings=512)
    report = adapt(path, settings(text, tokens=24), tmp_path / "student")
    assert report is not None
    ids = AutoTokenizer.from_pretrained(path)(TEXT[:600], return_tensors="pt").input_ids[:, :512]
    for name, folder in (("teacher_figures", path), ("student", tmp_path / "student")):
        rows = report[name]["unlike"]["by_position"]
        assert [(row["from"], row["to"]) for row in rows] == [(1, 65), (65, 96), (96, 257), (257, 512)]
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(folder)(ids).logits[0, 256:-1]
        expected = functional.cross_entropy(logits, ids[0, 257:]).exp().item()
        assert rows[-1]["perplexity"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("preset", [None, "icml2025", "icml2025-long"])
def test_adaptive_temperature_begins_with_the_weights_of_softmax_in_the_usual_row(teacher, preset: str | None) -> None:
    options = NormOptions(temperature_coefficients=preset)
    student = make_student(teacher(), "adaptive-temperature", options, 4, None, 24, 0)
    coefficients = student.described.temperature_coefficients
    assert coefficients == TEMPERATURE_PRESETS[preset or "icml2025-long"]
    factors = torch.cat([norm.log_scale.exp() for norm in attention_norms(student.model)])
    logits = torch.linspace(-7.06, 7.06, 30, dtype=torch.float64)
    divided = logits[None] * factors[:, None].detach()
    assert entropy(divided.softmax(-1)) == pytest.approx(2.5, abs=0.03)
    visible = torch.ones(30, dtype=torch.bool)
    found = attention_weights("adaptive_softmax", divided, visible, temperature_coefficients=coefficients)
    torch.testing.assert_close(found, logits.softmax(-1).expand_as(found), rtol=0.05, atol=1e-4)


def test_a_run_with_another_polynomial_is_not_resumed(teacher, text: Path, tmp_path: Path) -> None:
    path, output, published = teacher(), tmp_path / "student", NormOptions(temperature_coefficients="icml2025")
    adapt(path, settings(text, "adaptive-temperature", tokens=48, norm_options=published), output, stop_after=1)
    shared = (path, "--norm", "adaptive-temperature", "--text", text, "--held-out", text, "--length", 24)
    shared = (*shared, "--tokens", 48, "--rank", 4, "--dtype", "float32", "-o", output)
    refused = run(*shared)
    assert refused.exit_code == 2 and "holds a run with other settings" in refused.output
    assert run(*shared, "--temperature-coefficients", "icml2025").exit_code == 0
    written = json.loads((output / "config.json").read_text())["sharp"]
    assert written["temperature_coefficients"] == list(TEMPERATURE_PRESETS["icml2025"])


def test_alpha_grows_to_its_own_in_the_first_half_of_the_run(teacher, text: Path, tmp_path: Path, monkeypatch) -> None:
    seen: list[float] = []
    step = training.train_step

    def watched(student: Student, input_ids: Tensor, dtype: torch.dtype) -> tuple[float, float]:
        seen.append({norm.described.alpha for norm in attention_norms(student.model)}.pop())
        return step(student, input_ids, dtype)

    monkeypatch.setattr(training, "train_step", watched)
    chosen = settings(text, stage="short", calibrate="no", norm_options=NormOptions(alpha=2.05))
    report = adapt(teacher(), chosen, tmp_path / "student")
    assert report is not None and report["alpha"] == 2.05
    assert set(seen[:-8]) == {1.05}  # the speed is measured where a step takes longest
    assert seen[-8:] == pytest.approx([1.05, 1.3, 1.55, 1.8, 2.05, 2.05, 2.05, 2.05])


def test_half_of_the_tokens_are_in_sequences_of_four_times_the_length_spread_over_the_run() -> None:
    recipe = Recipe(steps=10, length=24, batch=1, long_steps=2, long_length=96)
    assert [recipe.shape_at(step)[1] for step in range(10)] == [24, 24, 24, 24, 96] * 2
    assert recipe.tokens == 2 * 8 * 24 // 2 + 2 * 96


def test_a_gguf_file_is_adapted(tmp_path: Path) -> None:
    write_gguf(tmp_path)
    text = tmp_path / "letters.txt"
    text.write_text(TEXT.replace(" ", "").replace("\n", ""))  # the model's tokenizer knows only 90 characters
    adapt(tmp_path / "tiny.gguf", settings(text, "ssa", tokens=48), tmp_path / "student")
    assert read_source(tmp_path / "student", "ssa").trained


def test_a_checkpoint_that_names_no_norm_is_exported_with_softmax(teacher, sharp_export, tmp_path: Path) -> None:
    result = sharp_export(teacher(), "-o", tmp_path / "exported")
    assert result.exit_code == 0, result.output
    norm = read_manifest(tmp_path / "exported").norm
    assert norm.name == "softmax" and norm.trained


def refusals(path: Path, output: Path, *arguments: object) -> str:
    """Return the message of a refused run, and assert that the run left no files behind."""
    before = sorted(output.parent.iterdir())
    result = run(path, "--norm", "entmax", "-o", output, *arguments)
    assert result.exit_code == 2, result.output
    assert sorted(output.parent.iterdir()) == before
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def test_bad_input_is_one_sentence_and_leaves_nothing(teacher, text: Path, tmp_path: Path, monkeypatch) -> None:
    llama, output = teacher(), tmp_path / "student"
    assert "is an encoder" in refusals(teacher("bert"), output, "--text", text)
    (tmp_path / "empty.pt2").touch()
    assert "is no Hugging Face folder and no .gguf file" in refusals(tmp_path / "empty.pt2", output, "--text", text)
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refusals(tmp_path / "empty", output, "--text", text)
    write_gguf(tmp_path)
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "tiny.gguf").read_bytes()[:3000])
    assert "is cut off: it ends after" in refusals(tmp_path / "cut.gguf", output, "--text", text)
    short = tmp_path / "short.txt"
    short.write_text("A few words.")
    assert "too short" in refusals(llama, output, "--text", short, "--length", 64)
    chinese = tmp_path / "chinese.txt"
    chinese.write_text("天地玄黄宇宙洪荒" * 3000)
    assert "does not know the script" in refusals(llama, output, "--text", chinese, "--length", 64)
    assert "does not exist" in refusals(llama, output, "--text", tmp_path / "none.txt", "--length", 64)
    assert "--budget is 'soon'" in refusals(llama, output, "--text", text, "--budget", "soon")
    assert "the model's context is 128" in refusals(llama, output, "--text", text, "--length", 999)
    refused = refusals(llama, output, "--text", text, "--layers", "0-9", "--length", 64)
    assert "--layers ends at 9, but the model's last layer is 1" in refused
    assert "is a folder; give a file with --held-out" in refusals(llama, output, "--held-out", tmp_path, "--length", 24)
    assert "where a folder is to be written" in refusals(llama, text, "--text", text)
    assert "give a Hugging Face folder or a .gguf file" in refusals(tmp_path / "none", output, "--text", text)
    assert "or choose --stage short" in refusals(llama, output, "--text", short, "--length", 8, "--stage", "long")
    monkeypatch.setattr(module, "memory_of", lambda _device: 1000)
    assert "GiB of memory" in refusals(llama, output, "--text", text, "--length", 24)


def test_a_model_without_attention_is_refused(tmp_path: Path, text: Path) -> None:
    folder = tmp_path / "mamba"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "mamba", "num_hidden_layers": 2}))
    assert "is a mamba model, which Sharp does not support" in refusals(folder, tmp_path / "student", "--text", text)


def test_an_adapted_model_is_not_adapted_again(teacher, text: Path, tmp_path: Path) -> None:
    adapt(teacher(), settings(text, tokens=24), tmp_path / "student")
    assert "was adapted to norm entmax" in refusals(tmp_path / "student", tmp_path / "second", "--text", text)


def test_a_full_disk_leaves_nothing_half_written(teacher, text: Path, tmp_path: Path, monkeypatch) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path, output = teacher(), tmp_path / "student"
    arguments = ("--norm", "entmax", "--text", text, "--length", 24, "--tokens", 48, "-o", output)
    with monkeypatch.context() as patch:
        patch.setattr(state, "save_file", full)
        result = run(path, *arguments)
        assert result.exit_code == 2 and "cannot be written" in result.output
        assert not output.exists()
    with monkeypatch.context() as patch:
        patch.setattr("sharp.exporter.adapt.output.write_report", full)
        result = run(path, *arguments)
        assert result.exit_code == 2 and "No space left" in result.output
        assert not output.exists() and not list(tmp_path.glob(".student*"))
    assert run(path, *arguments).exit_code == 0  # the run resumes from its state


@pytest.mark.parametrize("place", [(module, "train"), (rates, "seconds_per_token"), (measurement, "token_losses")])
def test_out_of_memory_is_one_sentence(teacher, text: Path, tmp_path: Path, monkeypatch, place) -> None:
    def fail(*_arguments: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    monkeypatch.setattr(*place, fail)
    arguments = ("--norm", "ssa", "--text", text, "--length", 24, "--tokens", 48)
    result = run(teacher(), *arguments, "-o", tmp_path / "student")
    assert result.exit_code == 2 and "there is not enough memory" in " ".join(result.output.split())


def test_a_damaged_norm_is_one_sentence(teacher, text: Path, tmp_path: Path, sharp_export) -> None:
    folder = tmp_path / "student"
    adapt(teacher(), settings(text, tokens=24), folder)
    config = json.loads((folder / "config.json").read_text())
    for damaged in (None, {}, {"norm": "entmax"}, {**config["sharp"], "norm": "no"}, {**config["sharp"], "alpha": 0}):
        (folder / "config.json").write_text(json.dumps({**config, "sharp": damaged}))
        result = sharp_export(folder, "-o", tmp_path / "exported")
        assert result.exit_code == 2 and "Traceback" not in result.output


@pytest.mark.full
def test_the_report_has_the_decode_speed_of_both(teacher, text: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(speed, "CONTEXTS", (64, 100))
    source = teacher()
    command = (source, "--norm", "ssa", "--text", text, "--length", 24, "--tokens", 48, "--measure-speed")
    result = run(*command, "-o", tmp_path / "student")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "student" / "report.json").read_text())
    assert [row["context"] for row in report["speed"]["rows"]] == [64, 100]
    assert all(row["median_ms"][name] > 0 for row in report["speed"]["rows"] for name in ("teacher", "student"))
    page = (tmp_path / "student" / "report.md").read_text()
    assert "## Decoding, milliseconds a token" in page and "| 100 |" in page


@pytest.mark.parametrize(
    ("longest", "contexts"), [(2**20, [4096, 32768]), (4129, [4096]), (4128, [4095]), (100, [67]), (20, [1])]
)
def test_the_speed_is_measured_within_the_models_context(monkeypatch, longest: int, contexts: list[int]) -> None:
    exported: list[int] = []
    monkeypatch.setattr(speed, "export_both", lambda _teacher, _student, context, *_: exported.append(context))
    monkeypatch.setattr(speed, "latencies", lambda _folder, lengths, _passes: lengths)
    found = speed.decode_speed(Path("teacher"), Path("student"), longest, lambda: None)
    assert found["rows"] == contexts and exported == [contexts[-1] + speed.COMPLETION_TOKENS + 1]


def test_a_speed_that_cannot_be_measured_loses_no_model(teacher, text: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(speed, "_measure", lambda *_: speed._run("sharp", "no-such-command"))
    report = adapt(teacher(), settings(text, "ssa", tokens=24, measure_speed=True), tmp_path / "student")
    assert report is not None and "no-such-command" in report["speed"]["failed"]
    assert list(report["head_parameters"]) == ["b", "n"] and report["head_parameters"]["n"] == pytest.approx(2, abs=0.2)
    assert "Decoding was not measured: sharp: " in (tmp_path / "student" / "report.md").read_text()
    AutoModelForCausalLM.from_pretrained(tmp_path / "student")
