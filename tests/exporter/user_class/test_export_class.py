"""`sharp export FILE.py:CLASS --weights FILE` builds the class as it was trained, and the export computes the same."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sharp.core.errors import InputError, NotFoundError
from sharp.core.manifest import read_manifest
from sharp.exporter.user_class.build import ClassOptions, program_of
from sharp.exporter.user_class.reference import parse_reference
from tests.exporter.user_class import nano

SIZES = {"block_size": 64, "vocab_size": 257, "n_layer": 1, "n_head": 2, "n_embd": 32, "bias": False}
TRAINING = {
    "lr": 1e-3,
    "weight_decay": 0.1,
    "dropout": 0.1,
    "batch_size": 8,
    "max_steps": 100,
    "seed": 3,
    "data_dir": "x",
}
ARGUMENTS = tuple(f"{name}={json.dumps(value)}" for name, value in SIZES.items())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the user's file and weights, from trainers that save the arguments and one that does not."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(nano.__file__, tmp_path / "gpt.py")
    torch.manual_seed(0)
    state = nano.GPT(nano.GPTConfig(**SIZES)).state_dict()
    torch.save(state, "bare.pt")
    compiled = {f"_orig_mod.{name}": tensor for name, tensor in state.items()}
    torch.save({"model": compiled, "model_args": SIZES, "config": {"learning_rate": 1e-3}, "iter_num": 9}, "nano.pt")
    torch.save({"model": state, "model_kwargs": SIZES | TRAINING}, "kwargs.pt")
    prefixed = {f"net.{name}": one for name, one in state.items()}
    torch.save({"state_dict": prefixed, "hyper_parameters": SIZES | TRAINING}, "l.ckpt")
    torch.save({"state_dict": prefixed, "hyper_parameters": SIZES | {"logit_scale": 0.5}}, "scaled.ckpt")
    torch.save({"model": state, "cfg": {"model": {"n_head": 2}}, "net_args": {"n_head": 1}, "epoch": 3}, "named.pt")
    torch.save({"model": state, "args": {"n_heads": 8, "depth": 2}}, "other.pt")
    texts = {
        name: json.dumps(value) for name, value in SIZES.items() if name in ("n_layer", "n_head", "n_embd", "bias")
    }
    save_file({name: one.clone() for name, one in state.items()}, "told.safetensors", {"format": "pt", **texts})
    return tmp_path


def made(source: str, **options: Any) -> Any:
    reference = parse_reference(Path(source))
    assert reference is not None
    if "weights" in options:
        options["weights"] = Path(options["weights"])
    return program_of(reference, ClassOptions(**options)).program.module()


CHOICES = {
    "nanoGPT's": ("gpt.py:GPT", {"weights": "nano.pt"}),
    "Lightning's": ("gpt.py:GPT", {"weights": "l.ckpt"}),
    "with arguments": ("gpt.py:GPT", {"weights": "bare.pt", "arguments": ARGUMENTS}),
    "as a module": ("gpt:GPT", {"weights": "nano.pt"}),
    "a namespace": ("gpt.py:GPT", {"weights": "nano.pt", "config_class": "namespace"}),
    "in metadata": ("gpt.py:Plain", {"weights": "told.safetensors"}),
    "of any name": ("gpt.py:Open", {"weights": "nano.pt"}),
    "of any name, in kwargs": ("gpt.py:Open", {"weights": "kwargs.pt"}),
    "one by one": ("gpt.py:Plain", {"weights": "bare.pt", "arguments": ("n_layer=1", "n_head=2", "bias=False")}),
}


@pytest.mark.parametrize(("source", "options"), CHOICES.values(), ids=CHOICES)
def test_a_class_computes_what_it_computed_in_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, options: dict[str, Any]
) -> None:
    monkeypatch.syspath_prepend(str(folder))
    trained = nano.GPT(nano.GPTConfig(**SIZES)).eval()
    trained.load_state_dict(torch.load(folder / "bare.pt", weights_only=True))
    ids = torch.tensor([[5, 200, 17, 256, 0], [1, 2, 3, 4, 5]])
    torch.testing.assert_close(made(source, **options)(ids)[0], trained(ids)[0])


def test_a_class_becomes_a_model_folder(folder: Path, sharp_export) -> None:
    result = sharp_export("gpt.py:GPT", "--weights", "nano.pt", "--norm", "softmax", "-o", folder / "out")
    assert result.exit_code == 0, result.output
    assert "GPT has no tokenizer, so it is served by token ids only; --tokenizer FOLDER" in result.stderr
    assert "--tokenizer bytes" in result.stderr
    assert "number of parameters" not in result.stdout
    manifest = read_manifest(folder / "out")
    assert (manifest.verified, manifest.source.name, manifest.tokenizer.file) == (True, "GPT", None)
    assert (manifest.layers, manifest.q_heads, manifest.vocab_size) == (1, 2, 257)


def test_weights_that_the_code_does_not_read_are_named(folder: Path, sharp_export) -> None:
    """Weights that the code does not read are named.

    The SSA authors' GPT-2 computes torch's softmax on PyTorch 2, and ignores its parameters a and n.
    """
    (folder / "ssa.py").write_text(
        "import gpt, torch\n\n\nclass Ssa(gpt.Plain):\n    def __init__(self):\n"
        "        super().__init__(1, 2, bias=False)\n        self.a = torch.nn.Parameter(torch.zeros(1))\n"
    )
    state = torch.load("bare.pt", weights_only=True)
    torch.save({**state, "a": torch.ones(1)}, "ssa.pt")
    result = sharp_export("ssa.py:Ssa", "--weights", "ssa.pt", "--norm", "softmax", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "Not used of Ssa: weights that its code does not read: a" in result.stderr


def test_a_function_makes_the_module_and_another_its_inputs(folder: Path) -> None:
    assert made("gpt.py:small")(torch.zeros(1, 3, dtype=torch.int64))[0].shape == (1, 1, 257)
    torch.save(nano.Projection().state_dict(), "projection.pt")
    with pytest.raises(InputError, match=r"called with token ids \[1, 8\]; .* --example FUNCTION"):
        made("gpt.py:Projection", weights="projection.pt")
    assert made("gpt.py:Projection", weights="projection.pt", example="vectors")(torch.ones(2, 9, 8)).shape == (2, 9, 8)


REFUSED = {
    "no class": ("gpt.py", {}, r"gpt\.py is Python: name the class in it, .* gpt\.py:Projection"),
    "misspelt": (
        "gpt.py:GTP",
        {"weights": "bare.pt"},
        r"gpt\.py has no class or function GTP; it has GPTConfig",
    ),
    "no weights": ("gpt.py:GPT", {}, r"gpt\.py:GPT is a class, .* --weights FILE"),
    "no module": ("gpt.py:GPTConfig", {"weights": "bare.pt"}, r"gives a GPTConfig, but must give a torch\.nn\.Module"),
    "missing": ("gpt.py:Plain", {"weights": "bare.pt"}, r"Plain needs n_layer, n_head, .* --arg n_layer=VALUE"),
    "more than its own": (
        "gpt.py:GPT",
        {"weights": "scaled.ckpt"},
        "the entry hyper_parameters of the weights has logit_scale, which GPTConfig does not take, .* --arg n_layer=1",
    ),
    "under another name": (
        "gpt.py:Plain",
        {"weights": "named.pt", "arguments": ("n_layer=1",)},
        "the weights have n_head 2 in cfg.model and 1 in net_args; say which with --arg n_head=VALUE",
    ),
    "of another class": (
        "gpt.py:Small",
        {"weights": "other.pt"},
        "the entry args of the weights has n_heads, depth, and Small takes width",
    ),
    "not read": (
        "gpt.py:GPT",
        {"weights": "scaled.ckpt", "config_class": "namespace"},
        "the settings have logit_scale, which GPT does not read",
    ),
    "unknown": (
        "gpt.py:Plain",
        {"weights": "bare.pt", "arguments": ("n=1",)},
        r"Plain takes no argument n; it takes",
    ),
    "of any name, misspelt": (
        "gpt.py:Open",
        {"weights": "nano.pt", "arguments": ("n_heads=2",)},
        r"Open takes arguments of any name, but its code has no name n_heads; correct --arg n_heads=VALUE",
    ),
    "of the config": (
        "gpt.py:GPT",
        {"weights": "bare.pt", "arguments": ("n_layers=1",)},
        r"GPTConfig takes no argument n_layers; it takes block_size, vocab_size",
    ),
    "type": (
        "gpt.py:Plain",
        {"weights": "bare.pt", "arguments": ("n_layer=two", "n_head=2")},
        r"--arg n_layer is 'two', but must be of type int",
    ),
    "no equals": ("gpt.py:Plain", {"weights": "bare.pt", "arguments": ("n_layer",)}, r"must be NAME=VALUE"),
    "other sizes": (
        "gpt.py:Plain",
        {"weights": "bare.pt", "arguments": ("n_layer=1", "n_head=2", "n_embd=64", "bias=false")},
        r"wte\.weight has shape \[257, 32\], and in Plain \[257, 64\]; are the arguments",
    ),
    "its code fails": ("gpt.py:broken", {}, r"broken\(\.\.\.\) fails at gpt\.py line \d+: KeyError: 'no such size'"),
    "its arguments fail": (
        "gpt.py:Plain",
        {"weights": "bare.pt", "arguments": ("n_layer=1", "n_head=0", "bias=false")},
        r"torch\.export cannot trace Plain at gpt\.py line \d+: .*called with token ids \[1, 8\]",
    ),
    "no example": ("gpt.py:small", {"example": "none"}, r"--example is 'none', but must be a function in gpt\.py"),
}


@pytest.mark.parametrize(("source", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_made_is_one_sentence(folder: Path, source: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        made(source, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import nothing_of_that_name", r"importing gpt2\.py fails at gpt2\.py line 1: ModuleNotFoundError"),
        ("class GPT(", r"fails at gpt2\.py line 1: SyntaxError"),
        ("raise SystemExit(3)", r"fails at gpt2\.py line 1: SystemExit: 3"),
        ("import gpt\n\nGPT = gpt.missing", r"fails at gpt2\.py line 3: AttributeError"),
    ],
)
def test_a_file_that_cannot_be_imported_is_one_sentence_with_its_line(folder: Path, code: str, message: str) -> None:
    (folder / "gpt2.py").write_text(code)
    with pytest.raises(InputError, match=message):
        made("gpt2.py:GPT", weights="bare.pt")


def test_a_file_in_a_package_imports_its_neighbours(folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "__init__.py").touch()
    (folder / "mine" / "sizes.py").write_text("LAYERS = 1\n")
    shutil.move(folder / "gpt.py", folder / "mine" / "whole.py")
    (folder / "mine" / "model.py").write_text(
        "from .sizes import LAYERS\nfrom .whole import GPT, GPTConfig\n\n\n"
        "def make():\n    return GPT(GPTConfig(n_layer=LAYERS, n_head=2, n_embd=32, bias=False))\n"
    )
    assert made("mine/model.py:make", weights="bare.pt")(torch.zeros(1, 3, dtype=torch.int64))[0].shape == (1, 1, 257)


def test_options_of_a_class_are_for_a_class(folder: Path, sharp_export) -> None:
    for options in (("--weights", "nano.pt"), ("--arg", "a=1"), ("--example", "f")):
        result = sharp_export("bare.pt", *options)
        assert result.exit_code == 2
        assert f"{options[0]} is for FILE.py:CLASS" in result.output
    assert "does not exist; give FILE.py:CLASS" in sharp_export("gone.py:GPT", "--weights", "nano.pt").output
    with pytest.raises(NotFoundError, match=r"the weights gone\.pt are no file"):
        made("gpt.py:GPT", weights="gone.pt")
