"""The training hook `attn_implementation="sharp-NORM"` for transformers models.

    import sharp.models.hugging_face
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sharp-ssa")  # or from_pretrained
    Trainer(model, ...).train()
    model.save_pretrained(folder)  # sharp-export FOLDER

The norm's learned parameters are registered in every attention module as `sharp_norm`, so they are saved and loaded
with the model's other parameters. `config.json` names the norm in the entry "attention_norm", so a program that imports
this module loads the model with its norm; another program would treat it as a model of plain attention. Other options
of the norm than its defaults are set in this entry before the model is made: `config.attention_norm = {"alpha": 1.25}`.
"""

from dataclasses import asdict, fields
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel, initialization
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from sharp.core.errors import InputError
from sharp.models.adapted_model import (
    NORM_MODULE,
    VERSION,
    AdaptedNorm,
    AttentionNorm,
    adapted_attention,
    attach,
    is_local,
)
from sharp.models.norms import NORMS

PREFIX = "sharp-"
ENTRY = "attention_norm"


def trained_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute attention for transformers' interface by `adapted_attention`, after checks of the model.

    Arguments and result are those of `adapted_attention`; `kwargs` may have dropout, which must be 0.

    Raises:
        InputError: attention has dropout, or the model was made without the norm.
    """
    if kwargs.get("dropout"):
        raise InputError("attention weights have no dropout under Sharp's norms; set it to 0 in the configuration")
    if not (hasattr(module, NORM_MODULE) or is_local(module)):
        raise InputError(
            "the model was made with another attention and has no parameters of the norm; make it with "
            'attn_implementation="sharp-NORM" in from_config or from_pretrained'
        )
    return adapted_attention(module, query, key, value, attention_mask, **kwargs)


for _name in NORMS:
    transformers.AttentionInterface.register(f"{PREFIX}{_name}", trained_attention)
    AttentionMaskInterface.register(f"{PREFIX}{_name}", sdpa_mask)


def attention_modules(model: nn.Module) -> tuple[str, ...]:
    """Return the names of self-attention modules, recognised by "Attention" in their class's name and a `layer_idx`.

    Cross-attention, modules for which `is_local` holds, and modules that contain another one are left out.
    """
    found = {
        name: module
        for name, module in model.named_modules()
        if "Attention" in type(module).__name__
        and isinstance(getattr(module, "layer_idx", None), int)
        and not getattr(module, "is_cross_attention", False)
        and not is_local(module)
    }
    return tuple(name for name in found if not any(other.startswith(f"{name}.") for other in found))


def attach_requested(model: PreTrainedModel) -> None:
    """Give `model` the norm that its configuration names, in place, and describe it in the configuration.

    Without a norm in the attention implementation or the entry "attention_norm", nothing is changed.

    Raises:
        InputError: the norm is unknown, its options cannot be used, or the model's attention is not found.
    """
    config: Any = model.config
    given = dict(getattr(config, ENTRY, None) or {})
    implementation = config._attn_implementation or ""
    if implementation.startswith(PREFIX):
        norm = implementation.removeprefix(PREFIX)
        if given.get("norm", norm) != norm:
            given = {}  # the entry is of another norm
    elif given.get("norm") in NORMS:
        norm = given["norm"]
        config._attn_implementation_internal = f"{PREFIX}{norm}"
    else:
        return
    modules = attention_modules(model)
    if not modules:
        raise InputError(f"a {type(model).__name__} has no attention modules that know their layer; use another model")
    unknown = sorted(set(given) - {field.name for field in fields(AdaptedNorm)})
    if unknown:
        raise InputError(f"config.{ENTRY} has the unknown entry {unknown[0]!r}")
    described = AdaptedNorm(
        **{
            "alpha": NORMS[norm].alpha,
            "hidden_size": config.hidden_size,
            "q_heads": config.num_attention_heads,
            "trained_context": config.max_position_embeddings,
            **given,
            "norm": norm,
            "attention_modules": modules,
            "version": VERSION,
        }
    )
    if not all(hasattr(model.get_submodule(name), NORM_MODULE) for name in modules):
        attach(model, described)
    setattr(config, ENTRY, asdict(described))


_post_init = PreTrainedModel.post_init
_initialize_weights = PreTrainedModel._initialize_weights


def _post_init_with_norm(self: PreTrainedModel) -> None:
    """Attach the norm that the model's config names, then run transformers' own post_init."""
    attach_requested(self)
    _post_init(self)  # type: ignore[no-untyped-call]


def _initialize_with_norm(self: PreTrainedModel, module: Any, is_custom_code: bool = False) -> Any:
    """Initialize like transformers; a norm that no file contains gets its start values.

    `module` is the module to initialize; the arguments and the result are those of transformers' method.
    """
    if isinstance(module, AttentionNorm) and not getattr(module, "_is_hf_initialized", False):
        with torch.device("cpu"):  # transformers makes models on the meta device
            start = dict(AttentionNorm(module.described, module.layer).named_parameters())
        for name, parameter in module.named_parameters():
            initialization.copy_(parameter, start[name])  # does not change what was loaded
    return _initialize_weights(self, module, is_custom_code)


PreTrainedModel.post_init = _post_init_with_norm  # type: ignore[method-assign]
PreTrainedModel._initialize_weights = _initialize_with_norm  # type: ignore[method-assign]
