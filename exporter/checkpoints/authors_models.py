"""Hugging Face folders that the papers' authors' code has written: their norm is in `config.json`, under their names.

| code | how it is known | norm |
| --- | --- | --- |
| deep-spin/asentmax, Gemma 2 | `entmax_alpha` | those that `attn_scale_type` and `poly_fit` choose |
| deep-spin/SparseModernBERT | `initial_alpha` of a modernbert | entmax in the layers that see all tokens |
"""

from typing import Any

from sharp.plugins.errors import InputError

DELTA, GAMMA_RANGE = 1, 2  # as in `sharp.models.query_scale`


def norm_of_configuration(content: dict[str, Any], where: str) -> dict[str, Any] | None:
    """What `--trained-norm` would say, of the content of a `config.json`; None where it is not of the authors' code.

    Raises:
        InputError: it is, and names what Sharp does not have.
    """
    kind = content.get("model_type")
    if kind == "modernbert" and content.get("initial_alpha") is not None:
        alpha = content["initial_alpha"]
        return {"norm": "softmax"} if alpha == 1 else {"norm": "entmax", "alpha": float(alpha)}
    if kind == "gemma2" and content.get("entmax_alpha") is not None:
        return _asentmax(content, where)
    return None


def prepare_configuration(config: Any) -> None:
    """Make transformers' configuration of a folder say what the authors' class does whatever it says."""
    if config.model_type == "gemma2" and getattr(config, "entmax_alpha", None) is not None:
        config.layer_types = ["full_attention"] * config.num_hidden_layers
        config.attn_logit_softcapping = None


def _asentmax(content: dict[str, Any], where: str) -> dict[str, Any]:
    """ASEntmax's Gemma 2 (synthetic/src/models/architectures/sparse_gemma.py): the norm by `attn_scale_type`."""
    alpha, scale = float(content["entmax_alpha"]), content.get("attn_scale_type")
    heads = content["num_attention_heads"]
    nape = bool(content.get("apply_nape", False))
    plain = alpha == 1.0
    norms = {
        None: ("adaptive-temperature" if content.get("poly_fit") else "softmax", "entmax"),
        "nakanishi": ("ssmax", None),
        "learn": (None, "sentmax"),
        "adapt-softplus-tanh": ("assmax", "asentmax"),
    }
    norm = norms.get(scale, (None, None))[0 if plain else 1]
    expected = {
        "attn_type": "regular",
        "attn_scale_delta": DELTA,
        "attn_scale_gamma_range": GAMMA_RANGE,
        "alibi_slope_type": "linear",
        "alibi_num_heads": heads // 2,
    }
    for name, value in expected.items():
        if content.get(name, value) != value:
            raise InputError(f"{where} has {name} {content[name]!r}, but Sharp has {value!r} only")
    if norm is None:
        raise InputError(f"{where} has attn_scale_type {scale!r} with entmax_alpha {alpha:g}, which no norm here is")
    attention = "model.layers.{layer}.self_attn.attn_scale_"
    parameters: dict[str, str] = {}
    if norm == "ssmax":
        parameters = {"s": f"{attention}beta"}
    elif norm == "sentmax":
        parameters = {"beta": f"{attention}beta", "gamma": f"{attention}gamma"}
    elif norm in ("assmax", "asentmax"):
        parameters = {f"{one}.weight": f"{attention}{one}_proj.weight" for one in ("beta", "gamma")}
        if content.get("attn_scale_proj_bias", False):
            parameters |= {f"{one}.bias": f"{attention}{one}_proj.bias" for one in ("beta", "gamma")}
    written: dict[str, Any] = {
        "norm": norm,
        "positions": "nape" if nape else "own" if content.get("apply_rotary", True) else "none",
        "softcap": 0.0,
        "scale": float(content["head_dim"]) ** -0.5,
        "parameters": parameters,
    }
    if not plain:
        written["alpha"] = alpha
    if nape and parameters:
        written["scaled_heads"] = heads - heads // 2
    return written
