"""Every normalizer agrees with independent numbers, with its definition, and with finite differences."""

import json
import math
from pathlib import Path

import entmax as entmax_package
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharp.core.errors import InputError
from sharp.models.norms import NORMS, get_norm
from sharp.models.ssa_parameters import SsaParameters
from sharp.plugins.op.attributes import HEAD_PARAMETERS
from sharp.plugins.op.schema import TEMPERATURE_PRESETS
from sharp.plugins.op.torch_normalizers import NORMALIZERS, attention_weights, entropy

GOLDEN = json.loads((Path(__file__).parents[1] / "plugins" / "conformance" / "normalizers.json").read_text())["rows"]
finite = st.floats(-30, 30, allow_nan=False, width=32)


def weights_of(row: list[float], normalizer: str, b: float = 1.0, n: float = 1.5, **options) -> torch.Tensor:
    """Return the weights of one row of float64 logits, as one head with one query."""
    logits = torch.tensor(row, dtype=torch.float64).view(1, 1, -1)
    head_params = torch.tensor([[b, n]], dtype=torch.float64) if normalizer == "ssa" else None
    visible = torch.ones_like(logits, dtype=torch.bool)
    return attention_weights(normalizer, logits, visible, head_params=head_params, **options).flatten()


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: f"{row['normalizer']}-{len(row['logits'])}")
def test_agrees_with_the_golden_rows(row):
    options = {name: row[name] for name in ("alpha", "b", "n") if name in row}
    weights = weights_of(row["logits"], row["normalizer"], **options)
    expected = torch.tensor(row["weights"], dtype=torch.float64)
    torch.testing.assert_close(weights, expected, rtol=1e-7, atol=1e-9)
    assert entropy(weights).item() == pytest.approx(row["entropy"], abs=1e-7)


CASES = [(norm.normalizer, norm.alpha) for norm in NORMS.values() if norm.scale_kind == "none"]
CASES += [("entmax", 1.25), ("entmax", 3.0)]


@pytest.mark.parametrize(("normalizer", "alpha"), CASES)
def test_gradient_agrees_with_finite_differences(normalizer, alpha):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    visible = torch.ones(3, 5).tril(1).bool()
    columns = len(HEAD_PARAMETERS.get(normalizer, ()))
    head_params = torch.tensor([[1.0, 1.5], [0.4, 2.5]], dtype=torch.float64)[:, :columns].requires_grad_()

    def function(logits, head_params):
        given = head_params if columns else None
        return attention_weights(normalizer, logits, visible, head_params=given, alpha=alpha)

    inputs = (logits, head_params) if columns else (logits, head_params.detach())
    assert torch.autograd.gradcheck(function, inputs, eps=1e-6, atol=1e-5)


def test_ssa_has_its_gradient_at_zero_too():
    # At z = 0, the derivative of the logarithm of an unnormalized weight is n b. The derivative of w_0 in a row of two
    # is therefore n b / 4.
    logits = torch.zeros(1, 1, 2, dtype=torch.float64, requires_grad=True)
    head_params = torch.tensor([[2.0, 1.5]], dtype=torch.float64)
    attention_weights("ssa", logits, torch.tensor(True), head_params=head_params)[0, 0, 0].backward()
    assert logits.grad[0, 0, 0].item() == pytest.approx(1.5 * 2.0 / 4)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("hidden_value", [0.0, 1e4, -1e4, math.inf, -math.inf, math.nan])
def test_masked_keys_take_no_part(normalizer, hidden_value):
    row = [0.3, -1.2, 2.0]
    logits = torch.tensor([[[*row, hidden_value]]], dtype=torch.float64, requires_grad=True)
    visible = torch.tensor([True, True, True, False])
    head_params = torch.tensor([[1.0, 1.5]]) if normalizer == "ssa" else None
    weights = attention_weights(normalizer, logits, visible, head_params=head_params)
    torch.testing.assert_close(weights[0, 0, :3], weights_of(row, normalizer))
    assert weights[0, 0, 3] == 0
    weights.square().sum().backward()
    assert logits.grad.isfinite().all()
    assert logits.grad[0, 0, 3] == 0


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_a_row_without_visible_key_is_zero(normalizer):
    logits = torch.randn(2, 3, 4, requires_grad=True)
    visible = torch.tensor([[True] * 4, [False] * 4, [True] * 4])
    head_params = torch.tensor([[1.0, 1.5], [1.0, 1.5]]) if normalizer == "ssa" else None
    weights = attention_weights(normalizer, logits, visible, head_params=head_params)
    assert (weights[:, 1] == 0).all()
    assert (entropy(weights)[:, 1] == 0).all()
    weights.square().sum().backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(normalizer, dtype):
    logits = torch.randn(2, 3, 4).to(dtype)
    visible = torch.ones(3, 4, dtype=torch.bool)
    head_params = torch.tensor([[1.0, 1.5], [0.7, 2.0]]) if normalizer == "ssa" else None
    with torch.autocast("cpu", torch.bfloat16):
        weights = attention_weights(normalizer, logits, visible, head_params=head_params)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, attention_weights(normalizer, logits.float(), visible, head_params=head_params))


@given(st.lists(finite, min_size=1, max_size=20))
def test_entmax_agrees_with_the_package(row):
    tensor = torch.tensor(row, dtype=torch.float64)
    torch.testing.assert_close(weights_of(row, "entmax", alpha=1.5), entmax_package.entmax15(tensor, dim=0))
    torch.testing.assert_close(weights_of(row, "entmax", alpha=2.0), entmax_package.sparsemax(tensor, dim=0))
    torch.testing.assert_close(
        weights_of(row, "entmax", alpha=1.3), entmax_package.entmax_bisect(tensor, alpha=1.3, dim=0)
    )


@pytest.mark.parametrize("alpha", [1.01, 1.08, 1.3, 1.5, 1.8, 2.5])
def test_compiled_entmax_takes_steps_enough(alpha, monkeypatch):
    """Compiled code cannot stop early when nothing changes, so its fixed number of steps must do for all rows."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    generator = torch.Generator().manual_seed(0)
    for keys in (1, 2, 64, 3000):
        for spread in (0.01, 1, 5, 100):
            logits = spread * torch.randn(16, keys, generator=generator, dtype=torch.float64)
            weights = attention_weights("entmax", logits[:, None], torch.tensor(True), alpha=alpha)[:, 0]
            expected = entmax_package.entmax_bisect(logits, alpha=alpha, n_iter=60)
            torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


@given(st.lists(finite, min_size=1, max_size=20), st.floats(0.01, 10), st.floats(1, 10))
def test_ssa_is_its_equation_5(row, b, n):
    scores = [(1 + b * abs(z)) ** (math.copysign(n, z) if z else 0.0) for z in row]
    expected = torch.tensor([score / sum(scores) for score in scores], dtype=torch.float64)
    torch.testing.assert_close(weights_of(row, "ssa", b=b, n=n), expected, rtol=1e-5, atol=1e-9)


def test_ssa_needs_its_parameters():
    with pytest.raises(InputError, match="head_params"):
        attention_weights("ssa", torch.zeros(1, 1, 2), torch.tensor(True))


def test_ssa_parameters_start_as_in_the_paper_and_stay_in_range():
    parameters = SsaParameters(3)
    torch.testing.assert_close(parameters(), torch.tensor([[1.0, 1.5]]).expand(3, 2))
    optimizer = torch.optim.SGD(parameters.parameters(), lr=10.0)
    for _ in range(20):
        parameters().sum().backward()
        optimizer.step()
    b, n = parameters().unbind(-1)
    assert (b > 0).all()
    assert (n >= 1).all()


def test_adaptive_temperature_leaves_sharp_rows_alone_and_sharpens_others():
    sharp, flat = [9.0, 0.0, 0.0], [0.3, 0.1, 0.0, -0.2, 0.2, 0.0]
    torch.testing.assert_close(weights_of(sharp, "adaptive_softmax"), weights_of(sharp, "softmax"))
    assert entropy(weights_of(flat, "adaptive_softmax")) < entropy(weights_of(flat, "softmax"))


def test_adaptive_temperature_takes_other_polynomials():
    row = [0.3, 0.1, 0.0, -0.2, 0.2, 0.0]
    constant = weights_of(row, "adaptive_softmax", temperature_coefficients=(3.0,))
    torch.testing.assert_close(constant, weights_of([3 * z for z in row], "softmax"))
    published = {
        weights_of(row, "adaptive_softmax", temperature_coefficients=c)[0] for c in TEMPERATURE_PRESETS.values()
    }
    assert len(published) == len(TEMPERATURE_PRESETS)


def test_registry_knows_every_norm_of_the_contract():
    assert set(NORMS) == {
        *(
            "softmax",
            "fixed-temperature",
            "adaptive-temperature",
            "ssmax",
            "ssmax-bias",
            "assmax",
            "entmax",
            "sparsemax",
        ),
        *("sentmax", "asentmax", "ssa", "sigmoid", "sigmoid-n", "relu", "relu-n", "relu2", "relu2-n", "softpick"),
        *("log-power", "llama4"),
    }
    assert {norm.normalizer for norm in NORMS.values()} == set(NORMALIZERS)


def test_the_error_of_an_unknown_norm_names_the_known_ones():
    with pytest.raises(InputError, match=r"'sofmax' is not known.*asentmax"):
        get_norm("sofmax")
