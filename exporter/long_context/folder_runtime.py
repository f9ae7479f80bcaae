"""An exported model folder in ONNX Runtime, with Sharp's kernels."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer

from sharp.core.errors import InputError
from sharp.core.manifest import check_verified, read_manifest
from sharp.exporter.forms.paged.session import PagedSession
from sharp.exporter.long_context.reader import Figures

STEP = 512  # tokens per step, which bounds the memory of the logits
SPARE = 512  # cache room in tokens for a question and its completion


class FolderRuntime:
    """A `TokenRuntime` of an exported decoder with a paged cache, as `sharp-serve` runs it on the CPU.

    `threads` is the number of CPU threads, 0 for all. `read` must come before the other methods.

    Raises:
        InputError, NotFoundError: `folder` has no decoder with a paged cache and tokenizer for ONNX Runtime, or failed
            verification.
    """

    def __init__(self, folder: Path, threads: int) -> None:
        manifest = read_manifest(folder)
        check_verified(folder, manifest, False)
        if manifest.kind != "decoder" or manifest.cache.form != "paged" or manifest.tokenizer.file is None:
            raise InputError(
                f"{folder} is no language model with a paged cache and a tokenizer; export it with --cache paged"
            )
        if manifest.target not in ("onnxruntime", "portable"):
            raise InputError(f"{folder} is for {manifest.target}; export it for ONNX Runtime, or give a server's URL")
        self.norm = manifest.norm.name
        self.max_context = manifest.max_context
        sizes = ("layers", "kv_heads", "head_dim", "value_dim")
        config: Any = SimpleNamespace(**{size: getattr(manifest, size) for size in sizes})
        kernels = manifest.target != "portable"
        self.session = PagedSession(folder, config, manifest.cache, kernels=kernels, threads=threads)
        self.sums: tuple[np.ndarray, np.ndarray] | None = None
        self.observed = 0
        self.length = 0
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # transformers raises almost anything
            raise InputError(f"the tokenizer of {folder} cannot be read: {error}") from error

    def read(self, ids: list[int]) -> Tensor:
        """Read a document into an emptied cache, in steps, and return the cross entropies in nats [ids - 1].

        The cache has room for the document and 512 tokens more.
        """
        self.session.reset(1, len(ids) + SPARE)
        self.sums, self.observed, self.length = None, 0, len(ids)
        tokens = np.array(ids, np.int64)
        losses = []
        for start in range(0, len(ids), STEP):
            logits, _ = self.session.step([tokens[start : start + STEP]])
            following = torch.from_numpy(tokens[start + 1 : start + 1 + STEP])
            rows = torch.from_numpy(logits[0])[: len(following)]
            losses.append(functional.cross_entropy(rows.float(), following, reduction="none"))
        return torch.cat(losses)

    def extend(self, ids: list[int]) -> Tensor:
        """Append tokens and return the logits float32 [vocab] after the last one; add up statistics of the heads."""
        before = self.session.lengths[0]
        logits, stats = self.session.step([np.array(ids, np.int64)])
        found = stats[0].astype(np.float64)  # [layers, tokens, q_heads, columns]
        visible = np.arange(before + 1, before + 1 + len(ids))[None, :, None]
        figures = (found[..., 0].sum(1), (found[..., 1] / visible).sum(1))
        self.sums = figures if self.sums is None else (self.sums[0] + figures[0], self.sums[1] + figures[1])
        self.observed += len(ids)
        return torch.from_numpy(logits[0][-1]).float()

    def extend_each(self, several: Sequence[list[int]]) -> list[Tensor]:
        """Return the logits [vocab] after each continuation, appending one continuation at a time to the document.

        Afterwards the cache holds the document alone.
        """
        found = []
        for ids in several:
            self.rewind()
            found.append(self.extend(ids))
        self.rewind()
        return found

    def rewind(self) -> None:
        """Remove all tokens after the document of the last `read` from the cache; statistics of the heads stay."""
        self.session.lengths[0] = self.length

    def heads(self) -> tuple[Figures, Figures] | None:
        """Return entropies (nats) and supports (share of visible keys) of the heads [layers][heads].

        Both are means over the tokens appended since `read`; None if there are none.
        """
        if self.sums is None:
            return None
        entropies, supports = (total / self.observed for total in self.sums)
        return entropies.tolist(), supports.tolist()
