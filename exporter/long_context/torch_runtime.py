"""A checkpoint in PyTorch, unchanged or with one of the controls, which need no training."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache

from sharp.core.errors import InputError
from sharp.exporter.adapt.figures import observed_heads
from sharp.exporter.adapt.training import LOGITS_ROWS
from sharp.exporter.checkpoints.hooked_model import HookedDecoder
from sharp.exporter.checkpoints.hugging_face import TransformersModel, hooked_model, open_model
from sharp.exporter.long_context.reader import Figures
from sharp.exporter.long_context.subjects import Control
from sharp.exporter.sources.norm_options import NO_OPTIONS
from sharp.models.adapted_model import MODEL_TYPE, VERSION, AdaptedNorm, attach, find_attention


class TorchRuntime:
    """A `TokenRuntime` of a causal language model of transformers with its cache, on `device`.

    `control` changes a softmax model without training; None leaves it unchanged. `read` must come before the other
    methods.

    Raises:
        InputError: the checkpoint cannot be read, is no causal language model with a tokenizer, or has layers to which
            the control does not apply. `check_subjects` has already refused controls of adapted models.
    """

    def __init__(self, path: Path, control: Control | None, device: torch.device) -> None:
        self.opened = open_model(path)
        if self.opened.architecture.kind != "decoder" or self.opened.tokenizer is None:
            raise InputError(f"{path} is no causal language model with a tokenizer, which sharp evaluate needs")
        adapted = self.opened.adapted
        self.norm = "softmax" if adapted is None else adapted.norm
        self.decoder = _decoder(path, self.opened, self.norm)
        self.max_context = self.decoder.config.max_context
        self.model = self.opened.model
        if adapted is None:
            self._attach(control)
        self.model.set_attn_implementation(MODEL_TYPE)
        nn.Module.to(self.model, device)
        self.device = device
        windows = (getattr(owner, "sliding_window", None) for owner in (self.model.config, *self.model.modules()))
        self.windowed = any(isinstance(window, int) for window in windows)
        # Only a table of positions ends at the model's context; rotary positions, ALiBi and no positions do not.
        tables = [module for module in self.model.base_model.modules() if isinstance(module, nn.Embedding)]
        self.goes_beyond = all(table is self.model.get_input_embeddings() for table in tables)
        self.cache: Any = None
        self.length = 0
        self.sums: tuple[Tensor, Tensor] | None = None
        self.observed = 0

    def _attach(self, control: Control | None) -> None:
        """Replace the model's attention by our own softmax, whose heads can be observed, with the control's change.

        Raises:
            InputError: the control does not apply, because layers differ in their scale.
        """
        config, modules = self.decoder.config, find_attention(self.model)
        described = AdaptedNorm(
            "softmax", modules, config.q_heads, config.hidden_size, config.trained_context, version=VERSION
        )
        if control is not None and control.kind == "temperature":
            scales = {getattr(self.model.get_submodule(name), "scaling", None) for name in modules}
            if len(scales) > 1:
                raise InputError("the model's layers differ in their scale; --control temperature is not for it")
            own = scales.pop()
            described = replace(described, scale=control.value * (config.head_dim**-0.5 if own is None else own))
        if control is not None and control.kind == "log-n":
            described = replace(described, norm="log-power", length_onset=int(control.value))
        attach(self.model, described)
        if control is not None and control.kind == "yarn":
            self.max_context = int(self.max_context * control.value)
            stretch(self.model, control.value)

    @torch.inference_mode()
    def read(self, ids: list[int]) -> Tensor:
        """Read a document into a new cache and return its cross entropies in nats, float32 [ids - 1] on the CPU."""
        self.cache, self.sums, self.observed = DynamicCache(), None, 0
        hidden = self._forward(ids)
        self.length = len(ids)
        following = torch.tensor(ids[1:], device=self.device)
        pairs = zip(hidden[:-1].split(LOGITS_ROWS), following.split(LOGITS_ROWS), strict=True)
        losses = [
            functional.cross_entropy(self.decoder.logits(rows).float(), right, reduction="none")
            for rows, right in pairs
        ]
        return torch.cat(losses).cpu()

    @torch.inference_mode()
    def extend(self, ids: list[int]) -> Tensor:
        """Append tokens and return the logits, float32 [vocab] on the CPU, after the last one."""
        return self._extended(ids, [len(ids)], None, None)[0]

    @torch.inference_mode()
    def extend_each(self, several: Sequence[list[int]]) -> list[Tensor]:
        """Return the logits [vocab] after each continuation, as if it alone followed the document.

        All continuations are computed at once under a mask, unless a layer has a window. Afterwards the cache holds the
        document alone.
        """
        self.rewind()
        if self.windowed:
            found = []
            for ids in several:
                found.append(self.extend(ids))
                self.rewind()
            return found
        counts = [len(ids) for ids in several]
        owner = torch.repeat_interleave(torch.arange(len(several)), torch.tensor(counts))
        place = torch.cat([torch.arange(count) for count in counts])
        among = (owner[:, None] == owner[None]) & (place[:, None] >= place[None])
        mask = torch.cat([torch.ones(len(owner), self.length, dtype=torch.bool), among], 1)
        joined = [token for ids in several for token in ids]
        found = self._extended(joined, counts, mask[None, None].to(self.device), self.length + place)
        self.rewind()
        return found

    def _extended(
        self, ids: list[int], counts: Sequence[int], mask: Tensor | None, positions: Tensor | None
    ) -> list[Tensor]:
        """Return the logits after the last token of each part of `ids`; `counts` are the parts' numbers of tokens."""
        with observed_heads(self.model, self._record):
            hidden = self._forward(ids, mask, positions)
        self.observed += len(ids)
        last = torch.tensor(counts).cumsum(0) - 1
        return list(self.decoder.logits(hidden[last.to(self.device)]).float().cpu())

    def rewind(self) -> None:
        """Remove all tokens after the document from the cache."""
        if (appended := self.cache.get_seq_length() - self.length) > 0:
            self.cache.crop(-appended)

    def heads(self) -> tuple[Figures, Figures] | None:
        """Return entropies (nats) and supports (share of visible keys) of the heads [layers][heads].

        Both are means over the tokens appended since `read`; None if there are none.
        """
        if self.sums is None:
            return None
        entropies, supports = (total / self.observed for total in self.sums)
        return entropies.tolist(), supports.tolist()

    def _forward(self, ids: list[int], mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Append tokens to the cache and return their last hidden states [tokens, hidden_size].

        `positions` continue the cache if not given; `mask` is transformers' attention mask.
        """
        start = self.cache.get_seq_length()
        if positions is None:
            positions = torch.arange(start, start + len(ids))
        output = self.model.base_model(
            input_ids=torch.tensor([ids], device=self.device),
            attention_mask=mask,
            position_ids=positions.to(self.device)[None],
            past_key_values=self.cache,
            use_cache=True,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _record(self, layer: int, heads: tuple[int, ...], entropies: Tensor, supports: Tensor) -> None:
        """Add the entropies (nats) and supports of a layer's `heads`, both [heads, tokens], to the sums over tokens."""
        if self.sums is None:
            shape = (self.decoder.config.layers, self.decoder.config.q_heads)
            self.sums = (torch.zeros(shape), torch.zeros(shape))
        for total, found in zip(self.sums, (entropies, supports), strict=True):
            total[layer, list(heads)] += found.sum(-1).cpu()


def _decoder(path: Path, opened: TransformersModel, norm: str) -> HookedDecoder:
    """Return the opened model with its attention replaced by the op under `norm`."""
    decoder = hooked_model(path, opened, norm, NO_OPTIONS)
    assert isinstance(decoder, HookedDecoder)
    return decoder


def stretch(model: nn.Module, factor: float) -> None:
    """Stretch every rotary embedding of `model` to `factor` times its context, by YaRN, in place.

    Raises:
        InputError: the model has no rotary embedding of the plain kind.
    """
    rotary = [
        (name, module) for name, module in model.named_modules() if type(module).__name__.endswith("RotaryEmbedding")
    ]
    config: Any = getattr(model, "config", None)
    own = getattr(config, "rope_parameters", None)
    if not rotary or not isinstance(own, dict) or own.get("rope_type", "default") != "default":
        raise InputError("the model has no plain rotary embedding, so --control yarn is not for it; leave it out")
    config.rope_parameters = {
        **own,
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": config.max_position_embeddings,
    }
    for name, module in rotary:
        kind: Any = type(module)
        model.set_submodule(name, kind(config=config))
