"""The student, which is the teacher's frozen weights with the new norm, low-rank adapters and a learned head scale."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sharp.core.errors import InputError, SharpError
from sharp.exporter.adapt.mixing import fold_mixings
from sharp.exporter.checkpoints.hooked_model import HookedDecoder
from sharp.exporter.checkpoints.hugging_face import TransformersModel, hooked_model, open_model
from sharp.exporter.checkpoints.hugging_face_checks import check_own_attention
from sharp.exporter.checkpoints.hugging_face_keys import check_weights
from sharp.exporter.sources.norm_options import NO_OPTIONS, NormOptions
from sharp.models.adapted_config import become_adapted
from sharp.models.adapted_model import (
    MODEL_TYPE,
    VERSION,
    AdaptedNorm,
    attach,
    attention_norms,
    find_attention,
    plain_softmax,
)

# Softmax is the control: training without a change of the norm.
NORMS = (
    "softmax",
    "entmax",
    "sparsemax",
    "sentmax",
    "asentmax",
    "ssa",
    "adaptive-temperature",
    "ssmax",
    "ssmax-bias",
    "assmax",
)
TEMPERATURE = "icml2025-long"  # the short published polynomial is 1 beyond 5.94 nats, which long contexts reach
USUAL_ENTROPY = 2.5  # nats, the mean over heads of SmolLM2 on 256 tokens and more
SSA_START = (1.0, 2.0)  # b and n; nearer to softmax's e^z than the paper's start values 1 and 1.5
FOLD_ERROR = 1e-3  # share of the largest logit; rounding is far below, a normalized projection far above


@dataclass(frozen=True)
class Student:
    """A model that is teacher and student in one, with shared base weights.

    `decoder` wraps the model for its sizes, and for logits from hidden states. `described` is the description of the
    student's norm, `adapter` the configuration of the low-rank adapters.
    """

    opened: TransformersModel
    decoder: HookedDecoder  # for sizes, and for logits from hidden states
    described: AdaptedNorm
    adapter: LoraConfig

    @property
    def model(self) -> PreTrainedModel:
        """The transformers model."""
        return self.opened.model

    def adapters(self) -> list[LoraLayer]:
        """Return the layers that have low-rank adapters."""
        return [module for module in self.model.modules() if isinstance(module, LoraLayer)]

    def learned(self) -> dict[str, nn.Parameter]:
        """Return all trained parameters by their names in the model; those of adapters have "lora_" in their names."""
        return {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if "lora_" in name or ".sharp_norm." in name
        }

    @contextmanager
    def teacher(self) -> Iterator[None]:
        """Turn the model into the teacher inside the context: plain softmax, no adapters, no gradients."""
        adapters = self.adapters()
        for layer in adapters:
            layer._disable_adapters = True
        try:
            with plain_softmax(self.model), torch.no_grad():
                yield
        finally:
            for layer in adapters:
                layer._disable_adapters = False

    def hidden(self, input_ids: Tensor, every_layer: bool = False) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute final hidden states [batch, tokens, hidden] of token ids int64 [batch, tokens].

        The second result holds the hidden states after each layer if `every_layer`; otherwise it is empty.
        """
        output = self.model.base_model(input_ids=input_ids, use_cache=False, output_hidden_states=every_layer)
        return output.last_hidden_state, output.hidden_states[1:] if every_layer else ()


def check_norm(norm: str, options: NormOptions) -> None:
    """Check that a model can be adapted to the norm with these options.

    Raises:
        InputError: `sharp adapt` does not know the norm, or the norm does not take an option.
    """
    if norm not in NORMS:
        raise InputError(f"--norm is {norm!r}, but must be one of: {', '.join(NORMS)}")
    options.check(norm)


def with_start_values(norm: str, options: NormOptions) -> NormOptions:
    """Return `options` with the defaults of adaptation where they differ from the norm's and the user gave none.

    Only adaptive-temperature has another default, the polynomial icml2025-long.
    """
    if norm == "adaptive-temperature" and options.temperature_coefficients is None:
        return replace(options, temperature_coefficients=TEMPERATURE)
    return options


def make_student(
    path: Path,
    norm: str,
    options: NormOptions,
    rank: int,
    layers: range | None,
    length: int,
    seed: int,
    ignore: Sequence[str] = (),
) -> Student:
    """Make the student of the checkpoint at `path`, as it is before its first step, on the CPU.

    Args:
        path: a Hugging Face folder or a .gguf file.
        norm: one of `NORMS`.
        options: the options of the norm.
        rank: the rank of the adapters.
        layers: the layers whose projections get adapters; None: all.
        length: the length of the training sequences, in tokens.
        seed: set as torch's global random seed before the adapters are made.
        ignore: unknown keys of the checkpoint to accept.

    Raises:
        InputError: the checkpoint cannot be read, is no causal language model, has no tokenizer, or was adapted
            already; or norm, options, `layers` or `length` do not fit.
    """
    check_norm(norm, options)
    opened = open_model(path, ignore=ignore)
    check_weights(path, opened.unused_weights, opened.head, opened.architecture.kind, ignore)
    if opened.architecture.kind != "decoder":
        raise InputError(f"{path} is an encoder ({opened.facts.model_type}); sharp adapt is for causal language models")
    if opened.adapted is not None:
        raise InputError(f"{path} was adapted to norm {opened.adapted.norm}; give the model that it was made from")
    if opened.tokenizer is None:
        raise InputError(f"{path} has no tokenizer, without which it cannot read a text; copy tokenizer.json beside it")
    decoder = hooked_model(path, opened, "softmax", NO_OPTIONS)
    assert isinstance(decoder, HookedDecoder)
    check_own_attention(path, decoder)
    model, config = opened.model, decoder.config
    if length > config.max_context:
        raise InputError(f"--length is {length}, but the model's context is {config.max_context}; choose less")
    modules = find_attention(model)
    fields = with_start_values(norm, options).config_fields()
    chosen = replace(config, **{"norm": norm, "alpha": 0.0, **fields})
    described = AdaptedNorm(
        norm,
        modules,
        q_heads=config.q_heads,
        hidden_size=config.hidden_size,
        trained_context=length,
        alpha=chosen.alpha,
        temperature_coefficients=chosen.temperature_coefficients,
        entropy_threshold=chosen.entropy_threshold,
        scaled_queries=True,
        version=VERSION,
    )
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    torch.manual_seed(seed)
    attach(model, described)
    _start(model, options)
    model.set_attn_implementation(MODEL_TYPE)
    adapter = _adapter(model, modules, rank, layers)
    inject_adapter_in_model(adapter, model)
    student = Student(opened, decoder, described, adapter)
    for parameter in student.learned().values():
        parameter.requires_grad_()  # peft freezes everything but its adapters
    return student


@torch.no_grad()
def _start(model: nn.Module, options: NormOptions) -> None:
    """Set start values of the norms of `model`, in place, that are near the softmax that the model was trained with."""
    b, n = (
        start if given is None else given
        for given, start in zip((options.ssa_b, options.ssa_n), SSA_START, strict=True)
    )
    for norm in attention_norms(model):
        scale = norm.query_scale
        if norm.described.scheme.normalizer == "adaptive_softmax":
            # Logits are divided by the inverse temperature of a row of usual entropy, which multiplies them later.
            factor = float(np.polyval(norm.described.temperature_coefficients, USUAL_ENTROPY))
            assert norm.log_scale is not None
            norm.log_scale.fill_(-math.log(max(1.0, factor)))
        if norm.head_parameters is not None:
            norm.head_parameters.fill(b, n)
        if scale is None:
            continue
        if scale.kind == "length":  # starts near 1 at the training length
            continue
        if scale.kind == "length-bias":
            scale.s.zero_()
            scale.b.fill_(1.0)
            continue
        for name, parameter in scale.named_parameters():
            parameter.fill_(math.log(2) if name == "beta" else 0.0)
        # The factor of the scale starts at 1 + ln 2 for every length, which log_scale undoes.
        assert norm.log_scale is not None
        norm.log_scale.fill_(-math.log1p(math.log(2)))


def _adapter(model: nn.Module, modules: tuple[str, ...], rank: int, layers: range | None) -> LoraConfig:
    """Return the configuration of adapters for the projections of the attention modules, or of those in `layers`.

    A projection named `gate_proj` gets no adapter.

    `modules` are the names of the attention modules in the order of the layers, and `rank` is the adapters' rank.

    Raises:
        InputError: `layers` ends after the last layer, or there are no linear projections.
    """
    if layers is not None and layers.stop > len(modules):
        raise InputError(
            f"--layers ends at {layers.stop - 1}, but the model's last layer is {len(modules) - 1}; end there or before"
        )
    targets, transposed = [], False
    for layer, name in enumerate(modules):
        if layers is not None and layer not in layers:
            continue
        for child, module in model.get_submodule(name).named_modules():
            if child == "gate_proj":  # of Arcee AFM, which peft takes for a part of the experts
                continue
            if isinstance(module, nn.Linear | Conv1D) and ".sharp_norm." not in f".{child}.":
                targets.append(f"{name}.{child}")
                transposed = transposed or isinstance(module, Conv1D)
    if not targets:
        raise InputError("the model's attention has no linear projections, which the adapters need; choose another")
    return LoraConfig(r=rank, lora_alpha=rank, target_modules=targets, lora_dropout=0.0, fan_in_fan_out=transposed)


@torch.no_grad()
def finish(student: Student, adapter_folder: Path | None = None) -> AdaptedNorm:
    """Merge all that was learned into the weights, in place, so that transformers saves an adapted model.

    The low-rank adapter is written to `adapter_folder` in peft's format, if a folder is given; it must not exist. The
    student cannot be trained afterwards.

    Returns:
        The description of the norm; its `scaled_queries` is False if the factors of heads became part of the weights.

    Raises:
        SharpError: the corrections of head outputs could not become part of the weights, which `calibrate` has tried.
    """
    model = student.model
    if adapter_folder is not None:
        adapter_folder.mkdir(parents=True)
        learned = {name: parameter for name, parameter in student.learned().items() if "lora_" in name}
        named = {
            f"base_model.model.{name.replace('.default', '')}": tensor.contiguous() for name, tensor in learned.items()
        }
        save_file(named, adapter_folder / "adapter_model.safetensors")
        student.adapter.save_pretrained(str(adapter_folder))
    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            base = module.get_base_layer()
            linear: Any = module  # every kind of adapted layer has its own get_delta_weight
            base.weight += linear.get_delta_weight("default").to(base.weight.dtype)
            model.set_submodule(name, base)
    if not fold_mixings(model, student.described.attention_modules):
        raise SharpError("the corrections of the heads do not fit into the trained output projections; report this")
    described = _fold_scales(student)
    del model.peft_config
    for norm in attention_norms(model):
        norm.described = described
    become_adapted(model, described)
    return described


def _fold_scales(student: Student) -> AdaptedNorm:
    """Multiply each head's factor into its query projection, unless that changes the logits of the model.

    Returns:
        The description of the norm, with `scaled_queries` False if the factors were multiplied.
    """
    model, described, config = student.model, student.described, student.decoder.config
    norms = attention_norms(model)
    projections = [getattr(model.get_submodule(name), "q_proj", None) for name in described.attention_modules]
    size = config.q_heads * config.head_dim
    if not all(isinstance(projection, nn.Linear) and projection.out_features == size for projection in projections):
        return described
    device = next(model.parameters()).device
    tokens = torch.arange(min(16, config.max_context), device=device)[None] % config.vocab_size
    before = model(input_ids=tokens, use_cache=False).logits
    kept = [
        [parameter.clone() for parameter in projection.parameters()]
        for projection in projections
        if projection is not None
    ]
    scales = [norm.log_scale for norm in norms]
    for norm, projection in zip(norms, projections, strict=True):
        assert norm.log_scale is not None and projection is not None
        rows = torch.exp(norm.log_scale).repeat_interleave(config.head_dim)
        for parameter in projection.parameters():
            parameter *= rows if parameter.ndim == 1 else rows[:, None]
        norm.log_scale = None
    after = model(input_ids=tokens, use_cache=False).logits
    if (after - before).abs().max() <= FOLD_ERROR * before.abs().max():
        return replace(described, scaled_queries=False)
    for norm, scale, projection, old in zip(norms, scales, projections, kept, strict=True):
        norm.log_scale = scale
        assert projection is not None
        for parameter, value in zip(projection.parameters(), old, strict=True):
            parameter.copy_(value)
    return described
