"""For every exported checkpoint of the repository, ONNX Runtime scores as PyTorch does on the same samples."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from sharp import LLM
from sharp.core.errors import InputError
from sharp.core.manifest import Manifest, read_manifest
from sharp.exporter.evaluate import main
from sharp.exporter.forms.uncached.scoring import RUNTIMES, ExportedModel, TorchModel, find_task
from sharp.models.checkpoint import read_checkpoint
from sharp.models.objective import TrainingBatch
from sharp.models.tasks.scoring import Scorable, score
from sharp.models.tasks.task import Metric, Sampler
from tests.full.end_to_end.commands import CHECKPOINT

CHECKPOINTS = sorted(CHECKPOINT.parent.glob("*.safetensors"))
MAX_RETRIEVAL = CHECKPOINT.parent / "max-retrieval-softmax.safetensors"
TEXT = Path(__file__).parents[3] / "LICENSE"


@dataclass(frozen=True)
class NextByte:
    """Windows of a text, in which every byte is predicted from the bytes before it."""

    outputs: int = 257

    def tokens(self, length: int) -> int:
        return length

    def sample(self, sequences: int, length: int, generator: torch.Generator) -> TrainingBatch:
        text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
        starts = torch.randint(len(text) - length, (sequences, 1), generator=generator)
        windows = text[starts + torch.arange(length + 1)]
        return TrainingBatch((windows[:, :-1],), windows[:, 1:])


def _questions(manifest: Manifest) -> tuple[Sampler, Metric, tuple[int, ...], int]:
    """Return a sampler, a metric, two lengths and a number of samples that take seconds."""
    if manifest.source.task in (None, "text"):
        return NextByte(), "accuracy", (64, 200), 4
    task = find_task(manifest, None)
    shortest = task.evaluation_lengths[0]
    if manifest.kind == "set":
        return task.sampler, task.metric, (shortest, 8 * shortest), 300
    return task.sampler, task.metric, (shortest, 2 * shortest), 8


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=[path.stem for path in CHECKPOINTS])
def test_exported_model_scores_like_pytorch(export, checkpoint):
    folder = export(checkpoint, read_checkpoint(checkpoint).model.config.norm, "none")
    manifest = read_manifest(folder)
    models: dict[str, Scorable] = {name: ExportedModel(folder, manifest, name, threads=1) for name in RUNTIMES}
    torch_model = TorchModel(checkpoint, manifest)
    sampler, metric, lengths, samples = _questions(manifest)
    for length in lengths:
        expected = score(torch_model, sampler, metric, length, samples).mean
        for model in models.values():
            # One sample may lie so close between two predictions that the order of sums decides.
            assert score(model, sampler, metric, length, samples).mean == pytest.approx(expected, abs=1 / samples)


def evaluate(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_the_command_writes_a_row_for_every_runtime(export, tmp_path):
    output = tmp_path / "scores.csv"
    options = ["--lengths", "16,64", "--samples", "50", "--threads", "1", "--output", output]
    result = evaluate(export(MAX_RETRIEVAL, "softmax", "none"), "--checkpoint", MAX_RETRIEVAL, *options)
    assert result.exit_code == 0, result.output
    header, *lines = output.read_text().splitlines()
    assert header == "task,norm,length,sweep,value,metric,score,standard_error,samples,seed,runtime"
    assert [line.split(",")[-1] for line in lines] == ["kernels"] * 2 + ["body"] * 2 + ["pytorch"] * 2
    scores = [line.split(",")[6] for line in lines]
    assert scores[:2] == scores[2:4] == scores[4:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "copy"], "task copy is not for a MaxRetrieval"),
        (["--checkpoint", CHECKPOINT], "is not what the folder was exported from"),
        (["--checkpoint", CHECKPOINT.parent / "max-retrieval-softmax-copy.safetensors"], "does not exist"),
        (["--lengths", "few"], "must be numbers"),
    ],
)
def test_bad_input_is_one_sentence(export, arguments, message):
    result = evaluate(export(MAX_RETRIEVAL, "softmax", "none"), *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_folder_of_another_form_is_refused(tmp_path):
    result = evaluate(tmp_path)
    assert result.exit_code == 2
    assert "is not a model folder" in " ".join(result.output.split())


def test_the_server_refuses_a_model_without_a_cache(export):
    with pytest.raises(InputError, match="the server needs --cache paged"):
        LLM(export(CHECKPOINT, "ssa", "none"))
    with pytest.raises(InputError, match="holds a MaxRetrieval, which writes no text"):
        LLM(export(MAX_RETRIEVAL, "softmax", "none"))
