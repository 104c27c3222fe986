"""A byte-level GPT, small enough to train on two cores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of the model. The default has 3.3 million parameters."""

    width: int = 256
    num_layers: int = 4
    num_heads: int = 4
    context: int = 128
    vocabulary: int = 256
    dropout: float = 0.1


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to its input."""

    mask: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.norm_1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.mix = nn.Linear(config.width, config.width)
        self.norm_2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)
        mask = torch.full((config.context, config.context), float("-inf")).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, of the shape of x: (batch, length, width)."""
        # Attention is spelt out because its fused backward is not deterministic on every GPU.
        batch, length, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + self.mask[:length, :length]
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.dropout(self.mix(mixed))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out. The head is tied to the embedding, as in most small models."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                deep = name.endswith(("mix.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * config.num_layers) ** 0.5 if deep else 0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: int64 (batch, length), length at most the context; logits: (batch, length, vocabulary)."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
