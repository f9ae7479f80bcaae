"""Modules are exported with tensors, tuples and dicts as inputs, compiled, and with images."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sharp
from sharp.core.errors import InputError
from sharp.exporter.forms.uncached.session import UncachedSession
from sharp.exporter.module import evaluated, trace
from tests.exporter.programs import gpt

WORDS = torch.randn(2, 9, gpt.WIDTH)
TOKENS = torch.arange(18).reshape(2, 9)


def exported(module: Any, inputs: Any, folder: Path, **options: Any) -> UncachedSession:
    assert sharp.export(module, inputs, cache="none", output=folder, **options).verification.passed
    return UncachedSession(folder, kernels=True)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(gpt.WIDTH, gpt.HEADS, 64, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Named(nn.Module):
    """A module with inputs by name, one of them a dict, and a dict as output."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, *, batch: dict[str, Tensor], added: Tensor) -> dict[str, Tensor]:
        return {"hidden": self.encoder(batch["x"] + added)}


def test_inputs_are_given_by_name_and_in_dicts(tmp_path: Path) -> None:
    module = Named()
    given = {"batch": {"x": WORDS}, "added": torch.ones(gpt.WIDTH)}
    session = exported(module, given, tmp_path / "model")
    longer = torch.randn(3, 17, gpt.WIDTH)
    with evaluated(module):
        expected = module(batch={"x": longer}, added=given["added"])["hidden"]
    np.testing.assert_allclose(session.run([longer.numpy(), given["added"].numpy()]), expected, atol=1e-5)


def test_a_tensor_is_one_input(tmp_path: Path) -> None:
    exported(Encoder(), WORDS, tmp_path / "model")


def test_a_compiled_module_is_exported_as_what_it_compiles(tmp_path: Path) -> None:
    module = gpt.GPT()
    module.attention[0] = torch.compile(module.attention[0], backend="eager")
    with evaluated(module):
        program = trace(module, TOKENS)
    assert not [name for name in program.state_dict if "_orig_mod" in name]
    assert isinstance(module.attention[0], torch._dynamo.OptimizedModule)  # the user's module stays compiled
    exported(torch.compile(module, backend="eager"), TOKENS, tmp_path / "model")


class Vision(nn.Module):
    """Patches of 4 by 4 pixels with a table of positions for images of 16 by 16, which fits no other size."""

    def __init__(self, *, table: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, gpt.WIDTH, 4, 4)
        self.places = nn.Parameter(torch.randn(1, 16, gpt.WIDTH)) if table else None
        self.encoder = Encoder()

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        return self.encoder(x if self.places is None else x + self.places).mean(1)


def test_an_image_keeps_its_size_where_no_other_runs(tmp_path: Path) -> None:
    session = exported(Vision(table=True), torch.randn(2, 3, 16, 16), tmp_path / "model")
    assert session.session.get_inputs()[0].shape == ["batch", 3, 16, 16]


@pytest.mark.full
def test_an_image_varies_where_it_can_and_is_never_smaller_than_the_kernel(tmp_path: Path) -> None:
    module, image = Vision(table=False), torch.randn(1, 3, 28, 20)
    session = exported(module, torch.randn(2, 3, 16, 16), tmp_path / "model")
    with evaluated(module):
        np.testing.assert_allclose(session.run([image.numpy()]), module(image), atol=1e-5)


class Axial(nn.Module):
    """Attention over rows, then over columns, so that the second layer's sequences differ from the first layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = Encoder(), Encoder()

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows(x.flatten(0, 1)).view(x.shape).transpose(1, 2)
        return self.columns(rows.reshape(-1, *rows.shape[2:])).view(rows.shape)


@pytest.mark.full
def test_layers_may_differ_in_their_sequences(tmp_path: Path) -> None:
    exported(Axial(), torch.randn(2, 5, 9, gpt.WIDTH), tmp_path / "model")


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x + torch.randn_like(x))


class Unwritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.i0(self.encoder(x))


@pytest.mark.parametrize(
    ("module", "inputs", "reason"),
    [
        (len, WORDS, "module is a builtin_function_or_method, but must be"),
        (Noisy(), WORDS, "something else every time: node randn_like, test_inputs.py line"),
        (Unwritten(), WORDS, "cannot be written as ONNX: node bessel_i0, No ONNX function"),
        (Encoder(), (), "example_inputs is empty"),
    ],
)
def test_what_cannot_be_exported_is_said_in_one_sentence(
    module: Any, inputs: Any, reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match=reason) as raised:
        sharp.export(module, inputs, cache="none", output=tmp_path / "model")
    assert "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")


def test_dropout_that_drops_is_named(tmp_path: Path) -> None:
    program = torch.export.export(Encoder().train(), (WORDS,))
    with pytest.raises(InputError, match=r"node dropout.* is random; leave it out, and call eval"):
        sharp.export(program, cache="none", output=tmp_path / "model")


def test_what_all_tokens_read_of_the_first_has_no_cache(tmp_path: Path) -> None:
    class First(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + x[:, :1]

    with pytest.raises(InputError, match=r"cannot have a cache: node .*test_inputs.py line .*x\[:, :1\]"):
        sharp.export(gpt.GPT(mixing=First()), TOKENS, output=tmp_path / "model")
