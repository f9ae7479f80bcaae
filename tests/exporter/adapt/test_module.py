"""`sharp.adapt_module` trains a module with softmax attention so that it computes with another norm."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sharp
from sharp.core.errors import InputError
from sharp.core.manifest import read_manifest
from sharp.exporter.adapt import training
from sharp.exporter.adapt.training import Progress
from sharp.models.normalized_attention import normalized_attention
from sharp.plugins.op.attributes import TEMPERATURE_PRESETS
from tests.exporter.programs import gpt
from tests.marks import full

TOKENS = torch.randint(97, 123, (512,), generator=torch.Generator().manual_seed(0))
SHORT = {"length": 24, "batch": 2, "steps": 12, "rank": 4}


@pytest.mark.parametrize(
    "norm", ["ssa", full("asentmax"), full("entmax"), full("ssmax"), full("sentmax"), "adaptive-temperature"]
)
def test_what_a_module_has_learned_is_exported_with_it(tmp_path: Path, norm: str) -> None:
    module = gpt.GPT(gpt.alibi).train()
    for attention in module.attention:  # large query weights make attention differ by token
        attention.query.weight.data *= 8
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    seen: list[int] = []
    adapted = sharp.adapt_module(
        module, TOKENS, norm=norm, **SHORT, on_step=lambda progress: seen.append(progress.step)
    )
    assert adapted.adapted < adapted.raw
    assert seen == list(range(1, 13))
    assert module.training
    changed = {name for name, tensor in module.state_dict().items() if not torch.equal(before[name], tensor)}
    assert changed == {f"attention.0.{name}.weight" for name in ("query", "key", "value", "out")}
    inputs = (torch.zeros(1, 9, dtype=torch.int64),)
    result = sharp.export(module, inputs, **adapted.export_options, output=tmp_path / "out")
    assert result.verification.passed
    written = read_manifest(tmp_path / "out").norm
    assert (written.name, result.manifest.norm.trained) == (norm, True)
    if norm == "adaptive-temperature":
        assert written.temperature_coefficients == TEMPERATURE_PRESETS["icml2025-long"]


def test_the_module_with_the_norm_in_its_code_diverges_by_what_is_returned() -> None:
    """The module with the norm in its code diverges by the returned amount on the last tokens, which are held out.

    The same seed learns the same weights.
    """
    module = gpt.GPT()
    held_out = TOKENS[-51:].unfold(0, 24, 24)
    with torch.no_grad():
        right = module(held_out).log_softmax(-1)
    adapted = sharp.adapt_module(module, TOKENS, norm="sparsemax", **SHORT)
    assert adapted.export_options == {"norm": "sparsemax", "trained_norm": True, "norm_parameters": {}}
    module.attention[0].attend = partial(normalized_attention, norm="sparsemax", causal=True)
    with torch.no_grad():
        found = module(held_out).log_softmax(-1)
    divergence = functional.kl_div(found, right, log_target=True, reduction="sum") / held_out.numel()
    assert divergence.item() == pytest.approx(adapted.adapted, rel=1e-3)
    again = sharp.adapt_module(gpt.GPT(), TOKENS, norm="sparsemax", **SHORT)
    assert (again.raw, again.adapted) == (adapted.raw, adapted.adapted)


def test_a_run_that_is_killed_and_resumed_gives_the_same_weights(tmp_path: Path, monkeypatch) -> None:
    def killed(progress: Progress) -> None:
        if progress.step == 8:
            raise KeyboardInterrupt

    monkeypatch.setattr(training, "SAVE_SECONDS", 0.0)
    whole, resumed, steps = gpt.GPT(), gpt.GPT(), []
    expected = sharp.adapt_module(whole, TOKENS, norm="ssa", **SHORT)
    with pytest.raises(KeyboardInterrupt):
        sharp.adapt_module(gpt.GPT(), TOKENS, norm="ssa", **SHORT, state=tmp_path / "state", on_step=killed)
    adapted = sharp.adapt_module(
        resumed, TOKENS, norm="ssa", **SHORT, state=tmp_path / "state", on_step=lambda one: steps.append(one.step)
    )
    assert steps == [9, 10, 11, 12]
    assert (adapted.raw, adapted.adapted) == (expected.raw, expected.adapted)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor)
    for name, tensor in expected.export_options["norm_parameters"].items():
        assert torch.equal(adapted.export_options["norm_parameters"][name], tensor)


def test_a_state_of_another_run_or_place_is_refused(tmp_path: Path) -> None:
    sharp.adapt_module(gpt.GPT(), TOKENS, norm="ssa", **SHORT, state=tmp_path / "state")
    other = gpt.GPT()
    other.attention[0].query.weight.data[0, 0] += 1
    for module, changes in ((gpt.GPT(), {"seed": 1}), (other, {})):
        with pytest.raises(InputError, match="holds a run with other settings"):
            sharp.adapt_module(module, TOKENS, norm="ssa", **SHORT, **changes, state=tmp_path / "state")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot be written to .*file"):
        sharp.adapt_module(gpt.GPT(), TOKENS, norm="ssa", **SHORT, state=tmp_path / "file")


def test_a_module_that_writes_into_tensors_is_adapted() -> None:
    module = gpt.GPT(gpt.written_into)
    adapted = sharp.adapt_module(module, TOKENS, norm="entmax", alpha=1.7, **SHORT)
    assert adapted.export_options["alpha"] == 1.7
    assert adapted.adapted < adapted.raw


class Untokened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = gpt.GPT()

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids).cumsum(1)


@pytest.mark.parametrize(
    ("module", "changes", "message"),
    [
        (gpt.GPT(gpt.with_weights(gpt.ssa_of_the_authors)), {}, "attention of GPT is ssa already; give one of softmax"),
        (Untokened(), {}, "Untokened is no causal language model, which can be adapted: .*cumsum"),
        (gpt.GPT(), {"tokens": TOKENS[0]}, "tokens must be int64"),
        (gpt.GPT(), {"tokens": TOKENS[:40]}, "at least 48 of them for sequences of 24"),
        (gpt.GPT(), {"length": 100}, "length is 100, but GPT has positions for 64 tokens"),
        (gpt.GPT(), {"tokens": TOKENS * 10}, "of a vocabulary of 257"),
        (gpt.GPT(), {"norm": "sigmoid"}, "--norm is 'sigmoid', but must be one of"),
        (gpt.GPT(), {"steps": 0}, "steps is 0, but must be at least 1"),
    ],
    ids=["norm", "no decoder", "one token", "few tokens", "long", "large tokens", "sigmoid", "no steps"],
)
def test_what_cannot_be_adapted_is_refused(module: nn.Module, changes: dict[str, Any], message: str) -> None:
    arguments = {"tokens": TOKENS, "norm": "ssa"} | SHORT | changes
    with pytest.raises(InputError, match=message):
        sharp.adapt_module(module, arguments.pop("tokens"), **arguments)
