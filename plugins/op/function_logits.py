"""The steps from query . key to the normalizer in both function bodies: soft cap, position bias, mask and window."""

import numpy as np

from sharp.plugins.op.node_list import NodeList


def shape_logits(nodes: NodeList, products: str, distance: str) -> str:
    """Append scale, soft cap and ALiBi; return the name of the logits, float32 [..., q_heads, queries, keys].

    `products` names query . key, float32 of the same shape. `distance` names key position less query position, int64,
    broadcastable to [..., q_heads, queries, keys]; "" leaves ALiBi out.
    """
    logits = nodes.op("Mul", products, nodes.attribute("scale", "float"))
    softcap = nodes.attribute("softcap", "float")
    capped_at = nodes.op("Greater", softcap, nodes.constant(0.0))
    cap = nodes.op("Where", capped_at, softcap, nodes.constant(1.0))
    capped = nodes.op("Mul", cap, nodes.op("Tanh", nodes.op("Div", logits, cap)))
    logits = nodes.op("Where", capped_at, capped, logits)
    if not distance:
        return logits
    slopes = nodes.unsqueeze("alibi_slopes", 1, 2)
    return nodes.op("Sub", logits, nodes.op("Mul", slopes, nodes.op("Cast", nodes.op("Abs", distance), to=1)))


def in_sight(nodes: NodeList, distance: str) -> str:
    """Append whether `causal` and `window` let a query see a key, and return the name: bool in the shape of `distance`.

    `distance` names key position less query position, int64.
    """
    zero = nodes.constant(0, np.int64)
    window = nodes.attribute("window", "int")
    windowed = nodes.op("GreaterOrEqual", window, zero)
    causal = nodes.op("Cast", nodes.attribute("causal", "int"), to=9)
    sees_future = nodes.op("Not", nodes.op("Or", causal, windowed))
    not_future = nodes.op("Or", sees_future, nodes.op("LessOrEqual", distance, zero))
    near = nodes.op("Greater", nodes.op("Add", distance, window), zero)
    return nodes.op("And", not_future, nodes.op("Or", nodes.op("Not", windowed), near))
