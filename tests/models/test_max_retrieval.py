"""The set model of the adaptive-temperature paper: a function of sets, trainable with every normalizer."""

from dataclasses import asdict, replace

import pytest
import torch
from safetensors import safe_open
from torch.nn import functional

from sharp.core.errors import InputError
from sharp.models.checkpoint import load_checkpoint, read_checkpoint, save_checkpoint
from sharp.models.evaluate import with_adaptive_temperature
from sharp.models.max_retrieval import MaxRetrieval, MaxRetrievalConfig
from sharp.models.norms import NORMS
from sharp.models.objective import loss
from sharp.models.tasks.largest_item import LargestItem
from sharp.models.trainer import Stage, TrainSettings, train

SAMPLER = LargestItem()


def new_model(norm="softmax", **fields) -> MaxRetrieval:
    torch.manual_seed(0)
    return MaxRetrieval(MaxRetrievalConfig(norm=norm, **fields)).eval()


def sets(count=8, items=12, seed=0):
    return SAMPLER.sample(count, items, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("norm", NORMS)
def test_the_order_of_the_items_does_not_matter(norm):
    items, query = sets().inputs
    model = new_model(norm)
    order = torch.randperm(items.shape[1], generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(items[:, order], query), model(items, query), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_reach_all_parameters(norm):
    model = new_model(norm).train()
    batch = sets(64)
    loss(model(*batch.inputs), batch.targets).backward()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:  # the constants of log-power and llama4 are not trained
            continue
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # The bias of the keys moves all logits of a row alike, which does not change weights that add up to 1.
        if name != "k_proj.bias":
            assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("norm", NORMS)
def test_one_item_and_many_items(norm):
    model = new_model(norm)
    for items in (1, 3000):
        assert model(*sets(2, items).inputs).isfinite().all()


def test_the_model_is_equations_9_to_14_written_out():
    model = new_model(hidden_size=32).double()
    items, query = (tensor.double() for tensor in sets().inputs)
    for layer in (model.q_proj, model.k_proj, model.v_proj, model.o_proj):
        torch.nn.init.normal_(layer.bias)

    def gelu(x):
        return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))

    def two_layers(mlp, x):
        return mlp[2](gelu(mlp[0](x)))

    h = gelu(two_layers(model.embed_item, items))
    q = two_layers(model.embed_query, query)
    for index in range(len(items)):
        logits = model.k_proj(h[index]) @ model.q_proj(q[index]) / 32**0.5
        weights = logits.exp() / logits.exp().sum()
        z = model.o_proj((weights[:, None] * model.v_proj(h[index])).sum(0))
        expected = two_layers(model.classify, z)
        torch.testing.assert_close(model(items, query)[index], expected, rtol=1e-5, atol=1e-6)


def test_the_loss_falls(tmp_path):
    settings = TrainSettings(
        steps=150,
        stages=(Stage(0, 5, 16),),
        batch_sequences=32,
        learning_rate=3e-3,
        warmup_steps=0,
        weight_decay=1e-3,
    )
    model = new_model()
    before = loss(model(*sets(256).inputs), sets(256).targets).item()
    train(model, SAMPLER.sample, lambda model: 0.0, settings, tmp_path, measure="accuracy", task="max-retrieval")
    assert loss(model(*sets(256).inputs), sets(256).targets).item() < 0.6 * before
    assert read_checkpoint(tmp_path / "latest.safetensors").task == "max-retrieval"


def test_adaptive_temperature_changes_inference_only():
    items, query = sets(8, 400).inputs
    plain, adaptive = new_model(), with_adaptive_temperature(new_model())
    assert adaptive.config.norm == "adaptive-temperature"
    torch.testing.assert_close(adaptive.train()(items, query), plain.train()(items, query))
    torch.testing.assert_close(adaptive.attention_logits(items, query)[0], plain.attention_logits(items, query)[0])
    shallow = {"temperature_coefficients": (2.0,), "entropy_threshold": 0.1}  # makes beta = 2 everywhere
    doubled = MaxRetrieval(replace(adaptive.config, **shallow)).eval()
    doubled.load_state_dict(plain.state_dict())
    logits, _ = plain.attention_logits(items, query)
    torch.testing.assert_close(doubled.attention(items, query)[0], torch.softmax(2 * logits, -1))


@pytest.mark.parametrize("norm", ["ssmax", "entmax", "ssa"])
def test_adaptive_temperature_is_refused_for_models_of_other_norms(norm):
    with pytest.raises(InputError, match="trained with softmax"):
        with_adaptive_temperature(new_model(norm))


def test_entmax_gives_most_items_no_weight():
    items, query = sets(4, 200).inputs
    model = new_model("sparsemax")
    torch.nn.init.normal_(model.q_proj.weight)
    weights, _ = model.attention(items, query)
    torch.testing.assert_close(weights.sum(-1), torch.ones(4))
    assert (weights == 0).float().mean() > 0.5


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("norm", NORMS)
def test_checkpoints_keep_the_model_and_its_task(tmp_path, norm, suffix):
    model = new_model(norm, hidden_size=16)
    save_checkpoint(tmp_path / f"max{suffix}", model, task="max-retrieval")
    stored = read_checkpoint(tmp_path / f"max{suffix}")
    assert stored.task == "max-retrieval"
    assert asdict(stored.model.config) == asdict(model.config)
    batch = sets()
    torch.testing.assert_close(stored.model(*batch.inputs), model(*batch.inputs), rtol=0, atol=0)


def test_a_checkpoint_of_another_kind_of_model_is_refused_where_a_language_model_is_needed(tmp_path):
    save_checkpoint(tmp_path / "max.safetensors", new_model())
    with pytest.raises(InputError, match="holds a MaxRetrieval"):
        load_checkpoint(tmp_path / "max.safetensors")
    with safe_open(tmp_path / "max.safetensors", framework="pt") as file:
        assert '"model": "max-retrieval"' in file.metadata()["sharp"]


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_parameters_of_another_norm_are_named(tmp_path, suffix):
    model = new_model()
    model.config = replace(model.config, norm="ssa")
    save_checkpoint(tmp_path / f"max{suffix}", model)
    with pytest.raises(InputError, match="that norm ssa needs"):
        read_checkpoint(tmp_path / f"max{suffix}")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"classes": 1}, "classes is 1"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"alpha": 1.0}, "alpha is 1.0"),
        ({"norm": "hardmax"}, "'hardmax' is not known"),
        ({"temperature_coefficients": ()}, "one or more finite numbers"),
    ],
)
def test_sizes_that_cannot_work_are_refused(fields, message):
    with pytest.raises(InputError, match=message):
        MaxRetrievalConfig(**fields)


def test_the_loss_ignores_what_is_not_asked():
    outputs = torch.randn(2, 3, 5)
    targets = torch.tensor([[1, -100, -100], [-100, 4, 0]])
    expected = functional.cross_entropy(
        torch.stack([outputs[0, 0], outputs[1, 1], outputs[1, 2]]), targets[targets >= 0]
    )
    torch.testing.assert_close(loss(outputs, targets), expected)
    numbers = torch.tensor([[1.0, torch.nan]])
    assert loss(torch.tensor([[[3.0], [9.0]]]), numbers).item() == 4.0
