"""A GPT as people write it: one file, a dataclass of settings, the embedding tied to the head, the last logits."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass
class GPTConfig:
    block_size: int = 64
    vocab_size: int = 257
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    bias: bool = True


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.n_head
        self.norm = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x):
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.attn(self.norm(x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.proj(mixed.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        print("number of parameters: a few")
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(x[:, [-1], :]), None


class Plain(GPT):
    """A GPT that takes its settings one by one."""

    def __init__(self, n_layer: int, n_head: int, n_embd: int = 32, bias: bool = True, name: str = "plain"):
        super().__init__(GPTConfig(n_layer=n_layer, n_head=n_head, n_embd=n_embd, bias=bias))


class Open(GPT):
    """A GPT that takes settings of any name."""

    def __init__(self, **settings):
        sizes = {name: settings[name] for name in ("n_layer", "n_embd", "bias")}
        super().__init__(GPTConfig(n_head=settings.get("n_head", 1), **sizes))


class Small(Plain):
    """A GPT with defaults for all its arguments."""

    def __init__(self, width: int = 32):
        super().__init__(1, 2, width, bias=False)


class Projection(nn.Module):
    """A module that attends over vectors, not tokens."""

    def __init__(self):
        super().__init__()
        self.attn = nn.Linear(8, 8)

    def forward(self, x):
        mixed = self.attn(x).unsqueeze(1)
        return functional.scaled_dot_product_attention(mixed, mixed, mixed).squeeze(1)


def vectors():
    return torch.zeros(1, 5, 8)


def small():
    torch.manual_seed(1)
    return GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32))


def broken():
    raise KeyError("no such size")
