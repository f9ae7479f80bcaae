"""The upgrade of checkpoints of version 1 to the present form, which computes exactly the same.

| earlier | today |
| --- | --- |
| `ssmax` with s L + b | `ssmax-bias`; `ssmax` is s L |
| `sentmax` with beta = softplus(beta_raw), gamma = 2 tanh(gamma_raw) | beta and gamma themselves |
| `asentmax`, `assmax` without biases in their projections | biases of 0 |
| length scales of all heads under NAPE, of which half did nothing | those of the heads that are scaled |
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sharp.models.query_scale import GAMMA_RANGE

SCALE = "query_scale."
NORM_PARAMETERS = ("s", "b", "beta_raw", "gamma_raw", "w_beta.weight", "w_gamma.weight")


def upgrade(content: dict[str, Any], state: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return description and tensors of a checkpoint of version 1 in the form of version 2, as new dicts.

    Of a damaged description only the version is changed; `parse_description` refuses it later.
    """
    config = content.get("config")
    if not isinstance(config, dict) or not any(SCALE in name for name in state):
        return {**content, "version": 2}, state
    config = dict(config)
    if config.get("norm") == "ssmax" and any(name.endswith(f"{SCALE}b") for name in state):
        config["norm"] = "ssmax-bias"
    first = 0
    heads = config.get("q_heads")
    if config.get("positions") == "nape" and isinstance(heads, int):
        first = heads // 2
    state = upgrade_scales(state, first, heads if isinstance(heads, int) else None)
    return {**content, "version": 2, "config": config}, state


def upgrade_scales(state: dict[str, Tensor], first: int = 0, heads: int | None = None) -> dict[str, Tensor]:
    """Return `state` with the parameters of length scales under their present names and in their present form.

    Only the heads from `first` on are scaled, so parameters of all `heads` lose the values of the others.
    """
    made: dict[str, Tensor] = {}
    for name, value in state.items():
        prefix, found, own = name.rpartition(SCALE)
        if not found or own not in NORM_PARAMETERS or not value.is_floating_point():
            made[name] = value
            continue
        if value.ndim and value.shape[0] == heads:
            value = value[first:]
        if own == "beta_raw":
            made[f"{prefix}{SCALE}beta"] = functional.softplus(value.float())
        elif own == "gamma_raw":
            made[f"{prefix}{SCALE}gamma_exponent"] = GAMMA_RANGE * torch.tanh(value.float())
        else:
            made[name] = value
            bias = f"{name.removesuffix('weight')}bias"
            if own.endswith(".weight") and bias not in state:
                made[bias] = torch.zeros(value.shape[0])
    return made
