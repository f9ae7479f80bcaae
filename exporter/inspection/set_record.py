"""Recording the set model's head: what it does with the first n items of a set, for every n.

A set has one query, so it would have one row of statistics. The logit of an item depends on no other one; but for a
length scale, neither does the query. So the sets of the first n items are what a causal head sees at token n.
"""

import numpy as np
import torch

from sharp.exporter.inspection.one_sequence import attend_one_sequence
from sharp.exporter.inspection.recording import Floats, LayerRecord
from sharp.plugins.ops.normalizers import Normalizer

QUERY = 0.5  # of a set; it carries no information


def set_record(
    query: Floats,
    key: Floats,
    head_params: Floats | None,
    normalizer: Normalizer,
    scale: float,
    length_scale: Floats | None,
) -> LayerRecord:
    """The record of the head from its query for each n [items, 1, head_dim] and the keys [items, 1, head_dim]."""
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
