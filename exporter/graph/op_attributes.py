"""The attributes of an attention node: what the model's configuration and the layer say."""

from typing import Any

from sharp.models.attention import LayerOptions
from sharp.models.config import SharpConfig
from sharp.plugins.ops.attributes import DEFAULT_STATS_COLUMNS, STATS_COLUMNS_WITH_SINK


def op_attributes(config: SharpConfig, options: LayerOptions) -> dict[str, Any]:
    """Keyword arguments of `torch.ops.sharp.paged_attention` and `attention`."""
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
