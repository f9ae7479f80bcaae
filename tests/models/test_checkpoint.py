"""Checkpoints are loaded as they were saved, and files that are no checkpoints are refused in one sentence."""

import json
import os
import pickle
import zipfile
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from sharp.core.errors import InputError, NotFoundError
from sharp.models import checkpoint_files
from sharp.models.causal_lm import SharpForCausalLM
from sharp.models.checkpoint import load_checkpoint, read_checkpoint, save_checkpoint
from sharp.models.config import SharpConfig
from sharp.models.masked_lm import SharpForMaskedLM
from sharp.models.norms import NORMS

CONFIG = SharpConfig(
    vocab_size=20,
    hidden_size=16,
    intermediate_size=24,
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=4,
    norm="ssa",
    positions="nape",
    bos_token_id=3,
    eos_token_ids=(3, 4),
)
INPUT_IDS = torch.arange(10)[None]


@pytest.fixture
def model() -> SharpForCausalLM:
    torch.manual_seed(0)
    return SharpForCausalLM(CONFIG).eval()


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("tie", [True, False])
def test_round_trip(tmp_path, suffix, norm, tie):
    model = SharpForCausalLM(replace(CONFIG, norm=norm, alpha=0.0, tie_embeddings=tie)).eval()
    path = tmp_path / f"model{suffix}"
    save_checkpoint(path, model)
    loaded = load_checkpoint(path)
    assert loaded.config == model.config
    with torch.no_grad():
        assert torch.equal(loaded(INPUT_IDS), model(INPUT_IDS))


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("norm", NORMS)
def test_round_trip_of_an_encoder(tmp_path, suffix, norm):
    model = SharpForMaskedLM(replace(CONFIG, norm=norm, alpha=0.0, causal=False)).eval()
    path = tmp_path / f"model{suffix}"
    save_checkpoint(path, model)
    loaded = read_checkpoint(path).model
    assert loaded.config == model.config
    with torch.no_grad():
        assert torch.equal(loaded(INPUT_IDS), model(INPUT_IDS))
    with pytest.raises(InputError, match="holds a SharpForMaskedLM"):
        load_checkpoint(path)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_float16_is_loaded_as_float32(tmp_path, model, suffix):
    save_checkpoint(tmp_path / f"full{suffix}", model)
    save_checkpoint(tmp_path / f"half{suffix}", model, torch.float16)
    loaded = load_checkpoint(tmp_path / f"half{suffix}")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    for (name, ours), theirs in zip(model.named_parameters(), loaded.parameters(), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-6, msg=name)
        if ours.dim() == 1:
            assert torch.equal(theirs, ours)
    assert (tmp_path / f"half{suffix}").stat().st_size < (tmp_path / f"full{suffix}").stat().st_size


def test_others_may_read_the_file_that_is_saved(tmp_path, model):
    old = os.umask(0o022)
    try:
        save_checkpoint(tmp_path / "model.safetensors", model)
    finally:
        os.umask(old)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_weights_that_are_not_finite_are_not_saved(tmp_path, model):
    model.norm.weight.data[0] = torch.nan
    with pytest.raises(InputError, match=r"norm\.weight"):
        save_checkpoint(tmp_path / "model.safetensors", model)
    assert not list(tmp_path.iterdir())


def test_a_file_that_does_not_fit_in_memory_is_refused_in_one_sentence(tmp_path, model, monkeypatch):
    def unable(*_: object, **__: object) -> None:
        raise RuntimeError("unable to mmap 810000000093 bytes: Cannot allocate memory (12)")

    save_checkpoint(tmp_path / "model.safetensors", model)
    monkeypatch.setattr(checkpoint_files, "safe_open", unable)
    with pytest.raises(
        InputError, match=r"GiB, which do not fit in memory; use a machine with more, or a smaller model"
    ):
        load_checkpoint(tmp_path / "model.safetensors")


def test_another_suffix_is_refused(tmp_path, model):
    with pytest.raises(InputError, match="must end in"):
        save_checkpoint(tmp_path / "model.bin", model)
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(InputError, match="must end in"):
        load_checkpoint(tmp_path / "model.bin")


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
class TestBadFiles:
    def rewrite(self, path, model, change):
        """Save `model`, then rewrite the file with `change(content, state)` applied to its content."""
        save_checkpoint(path, model)
        if path.suffix == ".pt":
            content = torch.load(path, weights_only=True)
            change(content, content["state_dict"])
            torch.save(content, path)
        else:
            content, state = {"version": 2, "config": asdict(model.config)}, load_file(path)
            change(content, state)
            save_file(state, path, metadata={"sharp": json.dumps(content)})

    def test_missing(self, tmp_path, suffix):
        with pytest.raises(NotFoundError, match="does not exist"):
            load_checkpoint(tmp_path / f"none{suffix}")

    @pytest.mark.parametrize("kept", [0, 4, 200, 0.5, 0.99])
    def test_truncated(self, tmp_path, model, suffix, kept):
        path = tmp_path / f"model{suffix}"
        save_checkpoint(path, model)
        content = path.read_bytes()
        path.write_bytes(content[: int(kept * len(content)) if kept < 1 else kept])
        with pytest.raises(InputError, match="damaged"):
            load_checkpoint(path)

    def test_garbage(self, tmp_path, suffix):
        path = tmp_path / f"model{suffix}"
        path.write_bytes(bytes(range(256)) * 40)
        with pytest.raises(InputError, match="damaged"):
            load_checkpoint(path)

    def test_of_another_program(self, tmp_path, suffix):
        path = tmp_path / f"model{suffix}"
        state = {"weight": torch.zeros(2)}
        torch.save(state, path) if suffix == ".pt" else save_file(state, path)
        with pytest.raises(InputError, match="not a Sharp checkpoint"):
            load_checkpoint(path)

    def test_a_file_from_before_a_field_was_there_has_its_default(self, tmp_path, model, suffix):
        path = tmp_path / f"model{suffix}"

        def change(content, state):
            for field in ("tokenizer", "causal", "rope_factor", "rope_scaling"):
                del content["config"][field]

        self.rewrite(path, model, change)
        loaded = load_checkpoint(path)
        assert loaded.config == model.config
        assert loaded.config.tokenizer == "none"

    def test_of_another_version(self, tmp_path, model, suffix):
        path = tmp_path / f"model{suffix}"
        self.rewrite(path, model, lambda content, state: content.update(version=3))
        with pytest.raises(InputError, match="version 3, this Sharp reads 2"):
            load_checkpoint(path)

    def test_without_the_parameters_of_its_norm(self, tmp_path, model, suffix):
        path = tmp_path / f"model{suffix}"

        def change(content, state):
            for name in [name for name in state if "head_parameters" in name]:
                del state[name]

        self.rewrite(path, model, change)
        with pytest.raises(InputError, match="lacks 4 parameters that norm ssa needs"):
            load_checkpoint(path)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda content, state: state.pop("norm.weight"), r"lacks 1 parameters.*norm\.weight"),
            (lambda content, state: state.update(other=torch.zeros(1)), "1 parameters too many.*other"),
            (lambda content, state: state.update({"norm.weight": torch.zeros(3)}), r"shape \[3\].*\[16\]"),
            (lambda content, state: state["norm.weight"].fill_(torch.inf), "not finite"),
            (lambda content, state: content["config"].update(layers=0), "layers is 0"),
            (lambda content, state: content["config"].update(hidden_size=10**9), "parameters|shape"),
            (lambda content, state: content["config"].update(alpha="x"), "malformed"),
            (lambda content, state: content["config"].pop("vocab_size"), "incomplete"),
            (lambda content, state: content["config"].update(colour="red"), "unknown configuration field 'colour'"),
            (lambda content, state: content.pop("config"), "no model configuration"),
            (lambda content, state: content["config"].update(hidden_size=2**62), "from 1 to 2147483647"),
            (
                lambda content, state: content["config"].update(vocab_size=2**31 - 1, hidden_size=2**31 - 1),
                "too large a model",
            ),
            (
                lambda content, state: content["config"].update(q_heads=2**31 - 1, kv_heads=1, head_dim=2**31 - 2),
                "large",
            ),
            (lambda content, state: content["config"].update(rope_theta=10**400), "malformed"),
            (lambda content, state: content["config"].update(tie_embeddings="no"), "must be true or false"),
            (lambda content, state: content["config"].update(eos_token_ids=[1.5]), r"special token 1\.5"),
            (lambda content, state: content.update(model=["causal-lm"]), "holds the model"),
            (lambda content, state: content.update(task=5), "its task is no name"),
            (
                lambda content, state: state.update(_as(state, torch.float8_e4m3fn)),
                "float8_e4m3fn.*must be a plain tensor",
            ),
            (lambda content, state: state.update(_as(state, torch.complex64)), "complex64.*must be a plain tensor"),
        ],
    )
    def test_inconsistent(self, tmp_path, model, suffix, change, message):
        path = tmp_path / f"model{suffix}"
        self.rewrite(path, model, change)
        with pytest.raises(InputError, match=message):
            load_checkpoint(path)


def _as(state, dtype):
    return {"norm.weight": state["norm.weight"].to(dtype)}


@pytest.mark.parametrize("change", [torch.Tensor.to_sparse, lambda tensor: tensor.to("meta")])
def test_tensors_that_are_not_plain(tmp_path, model, change):
    save_checkpoint(tmp_path / "model.pt", model)
    content = torch.load(tmp_path / "model.pt", weights_only=True)
    content["state_dict"]["norm.weight"] = change(content["state_dict"]["norm.weight"])
    torch.save(content, tmp_path / "model.pt")
    with pytest.raises(InputError, match="must be a plain tensor"):
        load_checkpoint(tmp_path / "model.pt")


class Payload:
    def __reduce__(self):
        return (os.system, ("exit 1",))


def test_code_in_a_pt_file_is_not_run(tmp_path):
    path = tmp_path / "model.pt"
    torch.save({"format": "sharp", "version": 1, "config": Payload(), "state_dict": {}}, path)
    with pytest.raises(InputError, match="more than plain weights"):
        load_checkpoint(path)
    path.write_bytes(pickle.dumps(Payload()))
    with pytest.raises(InputError, match="damaged"):
        load_checkpoint(path)


@pytest.mark.parametrize("steps", [b"\x80\x02R.", b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R."])
def test_a_pt_file_whose_pickle_is_damaged_is_refused(tmp_path, steps):
    """torch raises IndexError and TypeError for such pickles; they become one sentence."""
    with zipfile.ZipFile(tmp_path / "tiny.pt", "w") as archive:
        archive.writestr("tiny/data.pkl", steps)
        archive.writestr("tiny/version", b"3\n")
    with pytest.raises(InputError, match=r"tiny\.pt is damaged"):
        load_checkpoint(tmp_path / "tiny.pt")


def test_whole_numbers_of_any_size_in_a_configuration(tmp_path, model):
    config = replace(model.config, positions="rope", rope_theta=10**30)  # does not fit in an int of 64 bits
    save_checkpoint(tmp_path / "tiny.pt", SharpForCausalLM(config))
    assert load_checkpoint(tmp_path / "tiny.pt").config.rope_theta == 1e30
    with pytest.raises(InputError, match=r"rope_theta is 1e\+39, but must be above 0 and finite in float32"):
        replace(config, rope_theta=10**39)


@pytest.mark.parametrize("name", [7, "two\nlines", "x" * 5000])
def test_a_parameter_with_no_name_is_refused_in_one_sentence(tmp_path, model, name):
    path = tmp_path / "tiny.pt"
    save_checkpoint(path, model)
    content = torch.load(path, weights_only=True)
    torch.save({**content, "state_dict": {**content["state_dict"], name: torch.zeros(1)}}, path)
    with pytest.raises(InputError, match="one of its parameters has a name that none has"):
        load_checkpoint(path)
