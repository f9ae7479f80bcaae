"""The record of the set model's head for the first n items of a set, for every n.

A set has one query, and so only one row of statistics. The logit of an item depends on no other item, and neither does
the query, except for a length scale. So a causal head at token n sees the same as the set model with the first n items.
"""

import numpy as np
import torch

from sharp.exporter.inspection.one_sequence import attend_one_sequence
from sharp.exporter.inspection.recording import Floats, LayerRecord
from sharp.plugins.op.normalizers import Normalizer

QUERY = 0.5  # the query of a set, which carries no information


def set_record(
    query: Floats,
    key: Floats,
    head_params: Floats | None,
    normalizer: Normalizer,
    scale: float,
    length_scale: Floats | None,
) -> LayerRecord:
    """Return the record of the set model's head for the first n items, for every n, as of a causal head at token n.

    Args:
        query: [items, 1 head, head_dim], the query for each n.
        key: [items, 1 head, head_dim].
        head_params: [1 head, P], the normalizer's learned parameters; None if it has none.
        normalizer: the normalizer of the head.
        scale: the factor of query . key.
        length_scale: [items, 1 head], the factor that is already part of the query; None if there is none, or it is not
            known. It does not change the statistics.
    """
    _, stats = attend_one_sequence(
        torch.from_numpy(query),
        torch.from_numpy(key),
        torch.zeros(len(key), 1, 1),
        None if head_params is None else torch.from_numpy(head_params),
        None,
        {
            "normalizer": normalizer.name,
            "alpha": normalizer.alpha,
            "temperature_coefficients": list(normalizer.temperature_coefficients),
            "entropy_threshold": normalizer.entropy_threshold,
            "scale": scale,
        },
    )
    return LayerRecord(
        query=query,
        key=key,
        head_params=head_params,
        alibi_slopes=None,
        normalizer=normalizer,
        scale=scale,
        softcap=0.0,
        window=-1,
        projections=None,
        stats=np.asarray(stats.numpy()),
        length_scale=length_scale,
    )
