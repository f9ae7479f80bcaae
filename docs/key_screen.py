"""Writes `key-screen.svg`: bytes that a decode step reads of each key, and its time, from archived results.

`python docs/key_screen.py` also prints the table of `key-screen.md`.
"""

import json
import statistics
import sys
from pathlib import Path

import matplotlib.pyplot as plt

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"
HEAD_DIM = 64
LABELS = {"softmax": "softmax", "entmax": "entmax", "entmax + screen": "entmax with a screen"}
COLORS = ("tab:red", "tab:gray", "tab:blue")


def bytes_of_a_key() -> list[float]:
    """Return the bytes of a key and its value that softmax, entmax, and entmax with a screen read, on average.

    Softmax reads all keys and values in float32; entmax all keys and few values; with a screen entmax reads the screen
    of all keys, and few strips of keys and few values.
    """
    rows = json.loads((RESULTS / "certified.json").read_text())["rows"]
    found = next(row for row in rows if row["context"] == 32768 and row["normalizer"] == "entmax")
    one = 4 * HEAD_DIM
    values = found["keys_read_in_full"] * one
    return [2 * one, one + values, HEAD_DIM + 8 + found["strips_read_in_full"] * one + values]


def decode_rows() -> list[dict]:
    """One layer, two threads, a float32 cache; a row for each of `LABELS`."""
    rows = json.loads((RESULTS / "attention_screen_32k.json").read_text())["rows"]
    return [
        next(row for row in rows if (row["subject"], row["cache_dtype"]) == (subject, "float32")) for subject in LABELS
    ]


def table() -> list[str]:
    """Lines of the page's table: the median of rounds, and of softmax's time over it in the same round."""
    rows = decode_rows()
    softmax = rows[0]["passes"]
    return [
        f"| {label} | {size:.0f} | {row['milliseconds']:.2f} | "
        f"{statistics.median(theirs / ours for theirs, ours in zip(softmax, row['passes'], strict=True)):.2f} |"
        for label, size, row in zip(LABELS.values(), bytes_of_a_key(), rows, strict=True)
    ]


def main(folder: Path = Path(__file__).parent) -> None:
    """Plot both into `folder`, and print the table."""
    plt.rcParams["svg.hashsalt"] = "sharp"
    figure, both = plt.subplots(1, 2, figsize=(8, 2.2), sharey=True)
    for axes, found, title, form in (
        (both[0], bytes_of_a_key(), "bytes a key and head", "%.0f"),
        (both[1], [row["milliseconds"] for row in decode_rows()], "ms a layer, two threads", "%.2f"),
    ):
        bars = axes.barh(list(LABELS.values()), found, color=COLORS)
        axes.bar_label(bars, fmt=form, padding=3)
        axes.set(title=title, xlim=(0, max(found) * 1.15), xticks=[])
        axes.invert_yaxis()
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    both[0].invert_yaxis()  # shared: turned once
    figure.tight_layout()
    figure.savefig(folder / "key-screen.svg", metadata={"Date": None})
    sys.stdout.write("\n".join(table()) + "\n")


if __name__ == "__main__":
    main()
