"""The registry of all `--norm` names. It imports no torch, so that commands refuse a wrong name at once.

A norm is a scale of the query (`sharp.models.query_scale`) and a normalizer (`sharp.plugins.op.torch_normalizers`).
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Literal

from sharp.core.errors import InputError
from sharp.plugins.op import custom_normalizer as custom

if TYPE_CHECKING:
    from torch import Tensor

ScaleKind = Literal["none", "length", "length-bias", "head", "token", "log-power", "llama4"]


@dataclass(frozen=True)
class NormDefinition:
    """The definition of one `--norm`: the scale of the query, the normalizer, and the normalizer's parameters.

    `alpha` matters to entmax only. `head_parameters` names the learned columns of the kernel input `head_params`
    [q_heads, P], which stand before the column of a model's sinks. `head_constants` are columns that are equal in every
    head. The learned parameters of the query scale are in `sharp.models.query_scale`.
    """

    name: str
    normalizer: str  # a normalizer of the op, or a user's normalizer, which has the norm's name
    scale_kind: ScaleKind = "none"
    head_parameters: tuple[str, ...] = ()
    head_constants: tuple[float, ...] = ()
    alpha: float = 1.5

    def own_params(self, learned: Tensor | None, q_heads: int) -> Tensor | None:
        """Return the normalizer's columns of `head_params` [q_heads, P]: the norm's constants, or else `learned`.

        The result is None if the norm has no constants and `learned` is None.
        """
        if not self.head_constants:
            return learned
        import torch

        return torch.tensor(self.head_constants).expand(q_heads, -1)


NORMS: dict[str, NormDefinition] = {
    norm.name: norm
    for norm in (
        NormDefinition("softmax", "softmax"),
        NormDefinition("fixed-temperature", "softmax"),  # the temperature is part of the model's `scale`
        NormDefinition("adaptive-temperature", "adaptive_softmax"),
        NormDefinition("ssmax", "softmax", scale_kind="length"),
        NormDefinition("ssmax-bias", "softmax", scale_kind="length-bias"),
        NormDefinition("assmax", "softmax", scale_kind="token"),
        NormDefinition("entmax", "entmax"),
        NormDefinition("sparsemax", "entmax", alpha=2.0),
        NormDefinition("sentmax", "entmax", scale_kind="head"),
        NormDefinition("asentmax", "entmax", scale_kind="token"),
        NormDefinition("ssa", "ssa", head_parameters=("b", "n")),
        NormDefinition("sigmoid", "sigmoid"),
        NormDefinition("sigmoid-n", "sigmoid", head_constants=(0.0, 1.0)),  # bias -ln n, Ramapuram et al. 2024
        NormDefinition("relu", "relu"),
        NormDefinition("relu-n", "relu", head_constants=(1.0,)),  # divided by n, Wortsman et al. 2023
        NormDefinition("relu2", "relu2"),
        NormDefinition("relu2-n", "relu2", head_constants=(1.0,)),
        NormDefinition("softpick", "softpick"),
        NormDefinition("log-power", "softmax", scale_kind="log-power"),
        NormDefinition("llama4", "softmax", scale_kind="llama4"),
    )
}


NORMS |= {name: NormDefinition(name, name) for name in custom.names() if name not in NORMS}


def get_norm(name: str) -> NormDefinition:
    """Return the norm called `name`.

    Raises:
        InputError: the norm does not exist; the message has the name that was meant, if one is close, and all names.
    """
    if name not in NORMS and custom.is_custom(name):  # a normalizer that was added after this module was imported
        return NormDefinition(name, name)
    if name not in NORMS:
        close = get_close_matches(name.lower().replace("_", "-"), NORMS, 1)
        meant = f"did you mean {close[0]}? " if close else ""
        raise InputError(f"norm {name!r} is not known; {meant}choose one of: {', '.join(NORMS)}")
    return NORMS[name]
