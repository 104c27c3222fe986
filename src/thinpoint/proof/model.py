"""A decoder-only language model over bytes, as large models are built: to have a training loop to measure."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from thinpoint.proof.scale import Shape

VOCABULARY = 256


class Layer(nn.Module):
    """Attention and a gated feed-forward layer, each on a normalised copy of its input and added to it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, hidden = shape.width, 8 * shape.width // 3
        self.num_heads = max(1, width // 64)
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x, result: (batch, length, width)."""
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class LanguageModel(nn.Module):
    """Bytes in, loss out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                ends_branch = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.num_layers) ** 0.5 if ends_branch else 0.02)

    def forward(self, text: Tensor) -> Tensor:
        """The loss of predicting each byte but the first. text: int64, (batch, context + 1)."""
        x = self.embedding(text[:, :-1]) + self.position.weight[: text.shape[1] - 1]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
