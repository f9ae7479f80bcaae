"""Hugging Face folders written by the code of the papers' authors, whose `config.json` has the norm under other names.

| code | recognized by | norm |
| --- | --- | --- |
| deep-spin/asentmax, Gemma 2 | `entmax_alpha` | an entry of `NORMS`: `attn_scale_type`, `poly_fit`, `use_fast_attn` |
| deep-spin/SparseModernBERT, ModernBERT | `initial_alpha`, or the class's name | entmax in layers that see all tokens |
| deep-spin/SparseModernBERT, RoBERTa | `initial_alpha`, or the class's name | entmax |
| qiuzh20/gated_attention, Qwen3 | a key of `GATES` in `sharp.models.gated_qwen3` | softmax, with gates behind it |

Sharp computes what the authors' class computes. `tests/exporter/checkpoints/authors` has numbers of that class for
every entry of `NORMS`, `POSITIONS` and `CLASSES`, and for every gate. A configuration that no entry describes is
refused.
"""

from typing import Any

from sharp.core.errors import InputError
from sharp.models.gated_qwen3 import GATES, has_gates, prepare
from sharp.models.gated_qwen3 import KEYS as GATE_KEYS

DELTA, GAMMA_RANGE = 1, 2  # the constants of `sharp.models.query_scale`
DEFAULT_ALPHA = 2.0  # for encoders whose configuration has no `initial_alpha`
# The paper lists its coefficients from the highest power down, but the authors' polyval multiplies them by powers from
# 0 up. The models were trained with this polynomial, so its coefficients are in the opposite order.
POLY_FIT = (-1.791, 4.917, -2.3, 0.481, -0.037)

# (attn_scale_type, entmax_alpha above 1, poly_fit where it has an effect) -> norm.
NORMS = {
    (None, False, False): "softmax",
    (None, False, True): "adaptive-temperature",
    ("nakanishi", False, False): "ssmax",
    ("adapt-softplus-tanh", False, False): "assmax",
    (None, True, False): "entmax",
    ("learn", True, False): "sentmax",
    ("adapt-softplus-tanh", True, False): "asentmax",
}
# (apply_rotary, apply_nape) -> positions.
POSITIONS = {(True, False): "own", (False, True): "nape", (False, False): "none"}
# The encoders' classes. ForSequenceClassification and Model ignore `initial_alpha` and start with alpha 2.
CLASSES = {
    f"Custom{name}{kind}": model_type
    for name, model_type in (("ModernBert", "modernbert"), ("Roberta", "roberta"))
    for kind in ("ForMaskedLM", "ForSequenceClassification", "Model")
}
DECODER_CLASSES = (("SparseGemma2ForCausalLM", "gemma2"), ("Qwen3ForCausalLM", "qwen3"))
GEMMA_KEYS = (
    *("entmax_alpha", "attn_type", "attn_scale_type", "attn_scale_delta", "attn_scale_gamma_range", "poly_fit"),
    *("attn_scale_proj_bias", "alibi_slope_type", "alibi_num_heads", "apply_nape", "apply_rotary", "use_fast_attn"),
    *("use_triton_entmax", "topk_size", "topk_length_rule"),
    *("sliding_window", "layer_types", "attn_logit_softcapping", "query_pre_attn_scalar"),  # the class ignores these
)
ENCODER_KEYS = ("initial_alpha", "alpha", "entmax_alpha", "use_triton_entmax", "pre_iter", "post_iter")


def norm_of_configuration(content: dict[str, Any], where: str) -> dict[str, Any] | None:
    """Translate the `content` of a `config.json` by the authors' code into the content of a `--trained-norm` file.

    `where` names the file in messages.

    Returns:
        The content, or None if `content` is not of the authors' code.

    Raises:
        InputError: the configuration is of the authors' code and names what Sharp does not have.
    """
    kind = content.get("model_type")
    if kind == "gemma2" and content.get("entmax_alpha") is not None:
        return _asentmax(content, where)
    if kind in CLASSES.values() and (content.get("initial_alpha") is not None or _custom_class(content)):
        return _encoder(content, where)
    return None


def keys_of_authors(content: dict[str, Any]) -> tuple[str, ...]:
    """Return the keys of a `config.json` that are read because it is of the authors' code; empty for other code.

    Raises:
        InputError: the configuration is of the authors' code and names what Sharp does not have.
    """
    if content.get("model_type") == "qwen3" and any(name in content for name in GATES):
        return GATE_KEYS
    if norm_of_configuration(content, "config.json") is None:
        return ()
    return GEMMA_KEYS if content.get("model_type") == "gemma2" else ENCODER_KEYS


def is_class_of_authors(name: str, model_type: str) -> bool:
    """Whether the class that reads `model_type`, with the norm or gates, stands for the authors' class `name`."""
    return CLASSES.get(name) == model_type or (name, model_type) in DECODER_CLASSES


def prepare_configuration(config: Any, where: str) -> None:
    """Set, in place, the values in transformers' configuration of a folder that the authors' class fixes in its code.

    A configuration of other code does not change. `where` names the folder in messages.

    Raises:
        InputError: the configuration is of Qwen3 with gates, and a key of them is neither true nor false.
    """
    if has_gates(config):
        prepare(config, where)
    if config.model_type == "gemma2" and getattr(config, "entmax_alpha", None) is not None:
        config.layer_types = ["full_attention"] * config.num_hidden_layers
        config.attn_logit_softcapping = None


def _custom_class(content: dict[str, Any]) -> str | None:
    """Return the first of config.json's `architectures` that is in `CLASSES`; None if none is."""
    names = content.get("architectures")
    found = [name for name in names if name in CLASSES] if isinstance(names, list) else []
    return found[0] if found else None


def _encoder(content: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the content of a `--trained-norm` file for RoBERTa or ModernBERT with entmax: norm and alpha.

    `content` is the `config.json` of the authors' code (sparse_roberta.py, sparse_modern_bert.py), `where` its name for
    messages.

    Raises:
        InputError: keys contradict each other, or the alpha is below 1.
    """
    name = _custom_class(content)
    stated = content.get("initial_alpha")
    alpha = _number(DEFAULT_ALPHA if stated is None else stated, "initial_alpha", where)
    if name is not None and CLASSES[name] != content["model_type"]:
        raise InputError(
            f"{where} is of model_type {content['model_type']!r} and of class {name!r}; correct one of them"
        )
    if name is not None and not name.endswith("ForMaskedLM") and alpha != DEFAULT_ALPHA:
        raise InputError(
            f"{where} has initial_alpha {alpha:g}, but {name} always computes with {DEFAULT_ALPHA:g}; set the one that "
            "it was trained with, and correct its class"
        )
    for other in ("alpha", "entmax_alpha"):
        if content.get(other) not in (None, alpha):
            raise InputError(
                f"{where} has {other} {content[other]!r} and initial_alpha {alpha:g}; leave one of them out"
            )
    if alpha < 1:
        raise InputError(f"{where} has initial_alpha {alpha:g}, but entmax needs 1 or more; correct it")
    return {"norm": "softmax"} if alpha == 1 else {"norm": "entmax", "alpha": alpha}


def _asentmax(content: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the content of a `--trained-norm` file for ASEntmax's Gemma 2: norm, positions and parameters.

    `content` is the `config.json` of the authors' code (synthetic/src/models/architectures/sparse_gemma.py), `where`
    its name for messages.

    Raises:
        InputError: a key has a value that Sharp does not have, or keys contradict each other.
    """
    alpha, scale = _number(content["entmax_alpha"], "entmax_alpha", where), content.get("attn_scale_type")
    for name in ("num_attention_heads", "head_dim"):
        if not isinstance(content.get(name), int):
            raise InputError(
                f"{where} has {name} {content.get(name)!r}, but entmax_alpha needs a whole number there; add it"
            )
    heads = content["num_attention_heads"]
    rope = content.get("rope_scaling") or content.get("rope_parameters") or {}
    expected = {
        "attn_type": "regular",
        "attn_scale_delta": DELTA,
        "attn_scale_gamma_range": GAMMA_RANGE,
        "alibi_slope_type": "linear",
        "alibi_num_heads": heads // 2,
        "rope_type": "default",
    }
    for name, value in expected.items():
        stated = rope.get("rope_type", rope.get("type", value)) if name == "rope_type" else content.get(name, value)
        if stated != value:
            raise InputError(f"{where} has {name} {stated!r}, but Sharp has {value!r} only")
    fast, poly = (bool(content.get(name, False)) for name in ("use_fast_attn", "poly_fit"))
    if alpha < 1 or (poly and alpha > 1):
        what = "poly_fit, which is for softmax," if poly else "a norm that is none: entmax"
        raise InputError(f"{where} has {what} with entmax_alpha {alpha:g}; correct one of them")
    # The authors' flash attention computes plain softmax, so the temperature has no effect with it.
    norm = NORMS.get((scale or None, alpha > 1, poly and not fast))
    if norm is None:
        temperature = " and poly_fit" if poly and not fast else ""
        raise InputError(
            f"{where} has attn_scale_type {scale!r}{temperature} with entmax_alpha {alpha:g}, which no norm here is"
        )
    switches = bool(content.get("apply_rotary", True)), bool(content.get("apply_nape", False))
    if switches not in POSITIONS:
        raise InputError(
            f"{where} has apply_rotary and apply_nape, both of which Sharp does not have at once; correct the one "
            "that is not so"
        )
    attention = "model.layers.{layer}.self_attn.attn_scale_"
    parameters: dict[str, str] = {}
    if norm == "ssmax":
        parameters = {"s": f"{attention}beta"}
    elif norm == "sentmax":
        parameters = {"beta": f"{attention}beta", "gamma": f"{attention}gamma"}
    elif norm in ("assmax", "asentmax"):
        parameters = {f"{name}.weight": f"{attention}{name}_proj.weight" for name in ("beta", "gamma")}
        if content.get("attn_scale_proj_bias", False):
            parameters |= {f"{name}.bias": f"{attention}{name}_proj.bias" for name in ("beta", "gamma")}
    written: dict[str, Any] = {
        "norm": norm,
        "positions": POSITIONS[switches],
        "softcap": 0.0,
        "scale": float(content["head_dim"]) ** -0.5,
        "parameters": parameters,
    }
    if norm == "adaptive-temperature":
        written["temperature_coefficients"] = list(POLY_FIT)
    if alpha > 1:
        written["alpha"] = alpha
    if POSITIONS[switches] == "nape" and parameters:
        written["scaled_heads"] = heads - heads // 2
    return written


def _number(value: object, name: str, where: str) -> float:
    """Return a number of config.json as float.

    InputError, with `name` and the file `where`, for any other value or a bool.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{where} has {name} {value!r}, but it must be a number")
    return float(value)
