"""The attributes of an attention node, from the model's configuration and the options of the layer."""

from typing import Any

from sharp.models.attention import LayerOptions
from sharp.models.config import SharpConfig
from sharp.plugins.op.attributes import DEFAULT_STATS_COLUMNS, STATS_COLUMNS_WITH_SINK


def op_attributes(config: SharpConfig, options: LayerOptions) -> dict[str, Any]:
    """Return the keyword arguments of `torch.ops.sharp.paged_attention` and `torch.ops.sharp.attention`."""
    return {
        "normalizer": config.scheme.normalizer,
        "scale": options.scale_of(config),
        "alpha": config.alpha,
        "temperature_coefficients": list(config.temperature_coefficients),
        "entropy_threshold": config.entropy_threshold,
        "softcap": options.softcap_of(config),
        "window": options.window,
        "causal": options.causal_of(config),
        "key_bound": options.key_bound,
        "stats_columns": DEFAULT_STATS_COLUMNS if options.sinks is None else STATS_COLUMNS_WITH_SINK,
    }
