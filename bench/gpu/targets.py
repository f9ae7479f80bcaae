"""The kernels' targets beside the measured figures; from the results of `run.py` alone."""

from collections.abc import Iterator
from typing import Any

BATCH, CONTEXT, PROMPT, LONG_PROMPT = 32, 8192, 8192, 32_768
SPARSE = (8, 32_768)  # batch and context from which entmax is to be faster


def targets(results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every target whose figures are in `results`, the content of the file that `bench.gpu.run` writes.

    The entries are target (its name), at least or at most (the limit), measured and met.
    """
    rows = {
        section: [row for row in part["rows"] if "error" not in row and "skipped" not in row]
        for section, part in results.items()
    }
    copy = next((row["gb_per_second"] for row in rows.get("machine", ()) if row["what"] == "copy"), None)
    decode = {(row["subject"], row["batch"], row["context"]): row for row in rows.get("decode", ())}
    prefill = {(row["subject"], row["length"]): row["milliseconds"] for row in rows.get("prefill", ())}

    for name in ("softmax", "ssa", "adaptive_softmax"):
        row = decode.get((name, BATCH, CONTEXT))
        if row and copy:
            yield _least(f"decode of {name}, share of copy bandwidth", 0.8, row["cache_gb_per_second"] / copy)
    softmax, entmax = decode.get(("softmax", *SPARSE)), decode.get(("entmax", *SPARSE))
    if softmax and entmax:
        faster = softmax["microseconds_per_layer"] / entmax["microseconds_per_layer"]
        yield _least(f"decode of entmax beside softmax, support {entmax['support']:.3f}", 1.5, faster)
    if short := decode.get(("softmax", 1, 1024)):
        yield _most("decode of one sequence of 1,024, microseconds", 15.0, short["microseconds_per_layer"])

    ours = {name: prefill.get((name, PROMPT)) for name in ("softmax", "ssa", "adaptive_softmax", "entmax")}
    peers = [time for (name, length), time in prefill.items() if name.startswith("torch") and length == PROMPT]
    if base := ours["softmax"]:
        if peers:
            yield _least("prefill of softmax, share of torch's best SDPA", 0.7, min(peers) / base)
        if ours["ssa"]:
            yield _least("prefill of ssa, share of our softmax", 0.85, base / ours["ssa"])
        for name, limit in (("adaptive_softmax", 1.6), ("entmax", 2.0)):
            if ours[name]:
                yield _most(f"prefill of {name}, times our softmax", limit, ours[name] / base)
    splash, long = prefill.get(("AdaSplash", LONG_PROMPT)), prefill.get(("entmax", LONG_PROMPT))
    if splash and long:
        yield _least("prefill of entmax beside AdaSplash", 2.0, splash / long)

    for row in rows.get("statistics", ()):
        limit = 1.03 if row["phase"] == "decode" else 1.05
        yield _most(f"{row['phase']} of {row['normalizer']} with statistics, times without", limit, row["on_ratio"])


def _least(target: str, limit: float, measured: float) -> dict[str, Any]:
    """Return the row of a target that is met if `measured` is at least `limit`."""
    return {"target": target, "at least": limit, "measured": measured, "met": measured >= limit}


def _most(target: str, limit: float, measured: float) -> dict[str, Any]:
    """Return the row of a target that is met if `measured` is at most `limit`."""
    return {"target": target, "at most": limit, "measured": measured, "met": measured <= limit}
