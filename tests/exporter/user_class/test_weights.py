"""Weights of a class are found in the files that trainers write, and other files are refused by name."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn

from sharp.core.errors import InputError
from sharp.exporter.user_class.weights import load_weights, read_weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.layer = nn.Linear(4, 4)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))


@pytest.fixture
def trained() -> Tied:
    torch.manual_seed(3)
    return Tied()


def prefixed(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in state.items()}


def halved(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor / 2 if tensor.is_floating_point() else tensor for name, tensor in state.items()}


LAYOUTS = {
    "bare": lambda state: state,
    "nanoGPT": lambda state: {"model": prefixed(state, "_orig_mod."), "iter_num": 7, "config": {"lr": 0.1}},
    "DDP": lambda state: {"model_state_dict": prefixed(state, "module."), "epoch": 1},
    "DDP of a compiled one": lambda state: prefixed(state, "module._orig_mod."),
    "compiled blocks": lambda state: {name.replace("layer.", "layer._orig_mod."): one for name, one in state.items()},
    "Lightning": lambda state: {"state_dict": prefixed(state, "model."), "hyper_parameters": {"width": 4}},
    "an entry that nobody else has": lambda state: {"trainer": {"network": state}, "best": torch.tensor(1.0)},
    "in half precision": lambda state: {
        name: one.bfloat16() if one.is_floating_point() else one for name, one in state.items()
    },
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_weights_are_found_wherever_a_trainer_puts_them(tmp_path: Path, trained: Tied, layout: Any) -> None:
    optimizer = torch.optim.AdamW(trained.parameters())
    trained.layer(torch.ones(4)).sum().backward()
    optimizer.step()
    content = layout(trained.state_dict())
    if "layer.weight" not in content:
        content = {"optimizer": optimizer.state_dict(), **content}
    torch.save(content, tmp_path / "model.pt")
    module = Tied()
    load_weights(module, "Tied", read_weights(tmp_path / "model.pt"))
    for name, tensor in trained.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], tensor, rtol=1e-2, atol=0)


def test_a_class_that_wraps_its_own_parts_finds_their_weights(tmp_path: Path, trained: Tied) -> None:
    class Compiled(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.compile(self.layer)

    module = Compiled()
    assert "layer._orig_mod.weight" in module.state_dict()
    torch.save(trained.state_dict(), tmp_path / "model.pt")
    load_weights(module, "Compiled", read_weights(tmp_path / "model.pt"))
    assert torch.equal(module.state_dict()["layer._orig_mod.weight"], trained.layer.weight)


def test_safetensors_keep_a_tied_tensor_under_one_name(tmp_path: Path, trained: Tied) -> None:
    save_model(trained, str(tmp_path / "model.safetensors"))
    module = Tied()
    load_weights(module, "Tied", read_weights(tmp_path / "model.safetensors"))
    assert torch.equal(module.head.weight, trained.head.weight)


@pytest.mark.parametrize(("entry", "factor"), [("model", 1.0), ("ema", 0.5)])
def test_averaged_weights_are_chosen_by_the_user(tmp_path: Path, trained: Tied, entry: str, factor: float) -> None:
    state = trained.state_dict()
    torch.save({"model": state, "ema": prefixed(halved(state), "module.")}, tmp_path / "model.pt")
    file = read_weights(tmp_path / "model.pt")
    with pytest.raises(InputError, match=r"weights of Tied 2 times, in model, ema.module: say which with"):
        load_weights(Tied(), "Tied", file)
    module = Tied()
    load_weights(module, "Tied", file, "ema.module" if entry == "ema" else entry)
    torch.testing.assert_close(module.layer.weight, trained.layer.weight * factor)


def test_averaged_weights_without_names_are_not_passed_over(tmp_path: Path, trained: Tied) -> None:
    state = trained.state_dict()
    torch.save({"model": state, "ema": {"shadow_params": [*state.values()]}}, tmp_path / "model.pt")
    file = read_weights(tmp_path / "model.pt")
    with pytest.raises(InputError, match=r"averaged weights in ema.shadow_params beside .*--weights-entry model"):
        load_weights(Tied(), "Tied", file)
    load_weights(Tied(), "Tied", file, "model")


def without(state: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in state.items() if key != name}


REFUSED = {
    "missing": (lambda s: without(s, "layer.bias"), r"lacks 1 of the 5 weights of Tied: layer\.bias"),
    "renamed": (
        lambda s: {**without(s, "layer.bias"), "layer.offset": s["layer.bias"]},
        r"lacks .*layer\.bias; it has layer\.offset instead",
    ),
    "unexpected": (lambda s: {**s, "layer.scale": torch.ones(1)}, r"no place for: layer\.scale; --ignore-key"),
    "beside the model": (
        lambda s: {**prefixed(s, "model."), "head.weight": torch.ones(1)},
        r"more than the weights of Tied in model: head\.weight; --weights-entry model",
    ),
    "another shape": (lambda s: {**s, "layer.bias": torch.zeros(5)}, r"layer\.bias has shape \[5\], and in Tied \[4\]"),
    "quantized": (
        lambda s: {**s, "layer.weight": torch.ones(4, 4, dtype=torch.int8)},
        r"layer\.weight is of type",
    ),
    "not finite": (lambda s: {**s, "layer.bias": torch.full((4,), torch.nan)}, r"layer\.bias are not all finite"),
    "untied": (lambda s: {**s, "head.weight": torch.ones(5, 4)}, r"has one tensor for (embedding|head)\.weight"),
    "of another model": (lambda s: {"a.b": torch.ones(1)}, r"holds no weights of Tied, .*it holds a\.b"),
    "twice": (lambda s: {**s, **prefixed(s, "_orig_mod.")}, r"with and without a wrapper's prefix"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path, trained: Tied, change: Any, message: str) -> None:
    torch.save(change(trained.state_dict()), tmp_path / "model.pt")
    with pytest.raises(InputError, match=message) as caught:
        load_weights(Tied(), "Tied", read_weights(tmp_path / "model.pt"))
    assert "\n" not in str(caught.value)


def test_the_user_says_which_weights_are_not_needed(tmp_path: Path, trained: Tied) -> None:
    torch.save({**trained.state_dict(), "layer.mask": torch.ones(1)}, tmp_path / "model.pt")
    load_weights(Tied(), "Tied", read_weights(tmp_path / "model.pt"), None, ["*.mask"])


def test_objects_beside_the_weights_are_never_unpickled(tmp_path: Path, trained: Tied) -> None:
    torch.save({"model": trained.state_dict(), "args": Namespace(width=4)}, tmp_path / "model.pt")
    with pytest.raises(InputError, match=r"holds objects beside its weights \(argparse\.Namespace\).*\['model'\]"):
        read_weights(tmp_path / "model.pt")
    torch.save(trained, tmp_path / "model.pt")
    with pytest.raises(InputError, match=r"whole pickled module \(.*Tied\), whose code Sharp does not run"):
        read_weights(tmp_path / "model.pt")


def sharded(folder: Path, model: Tied) -> Path:
    """Write the weights into two files, as Hugging Face's own writer splits them, and return the index."""
    split = split_torch_state_dict_into_shards(dict(model.state_dict()), max_shard_size=100)
    assert len(split.filename_to_tensors) > 1
    for name, keys in split.filename_to_tensors.items():
        save_file({key: model.state_dict()[key].clone() for key in keys}, folder / name)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": split.metadata, "weight_map": split.tensor_to_filename}))
    return index


def test_weights_in_several_files_are_read_by_their_index(tmp_path: Path, trained: Tied) -> None:
    index, module = sharded(tmp_path, trained), Tied()
    load_weights(module, "Tied", read_weights(index))
    for name, tensor in trained.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor)


def test_an_index_with_files_that_are_missing_or_elsewhere_is_refused(tmp_path: Path, trained: Tied) -> None:
    index = sharded(tmp_path, trained)
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(InputError, match="which is missing; copy the checkpoint again"):
        read_weights(index)
    index.write_text(json.dumps({"weight_map": {"layer.bias": "../model.safetensors"}}))
    with pytest.raises(InputError, match="which is not in the folder"):
        read_weights(index)
    index.write_text("[]")
    with pytest.raises(InputError, match="it has no weight_map"):
        read_weights(index)


def test_files_of_an_index_that_hold_a_weight_twice_are_refused(tmp_path: Path, trained: Tied) -> None:
    index = sharded(tmp_path, trained)
    first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
    save_file(load_file(first) | load_file(second), second)
    with pytest.raises(InputError, match="twice; save the checkpoint again"):
        read_weights(index)
