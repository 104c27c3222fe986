"""Decoder-only language models over bytes, dense or with a mixture of experts, to make training state with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a model.

    Attributes:
        width, num_layers, num_heads, context: as usual; context in bytes of text.
        hidden: width of a feed-forward layer, or of one expert.
        num_experts: 0 for a dense model.
    """

    width: int
    num_layers: int
    num_heads: int
    hidden: int
    context: int
    num_experts: int = 0


class Dense(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x, result: (batch, length, width)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Gated feed-forward layers of which each token goes through two.

    The experts' weights are one tensor a matrix, so an expert without tokens has zeros in its gradient and moments.
    The router's biases leave the last eighth of the experts idle until training wakes them.
    """

    IDLE_BIAS = -4.0
    """An untrained router's logits spread by about 0.5."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts, width, hidden = config.num_experts, config.width, config.hidden
        self.router = nn.Linear(width, experts)
        self.gate = nn.Parameter(torch.empty(experts, hidden, width))
        self.up = nn.Parameter(torch.empty(experts, hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        self.imbalance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """x, result: (batch, length, width). Sets `imbalance`, a loss. Waits for the device once."""
        shape, x = x.shape, x.flatten(0, -2)
        num_experts = self.gate.shape[0]
        share = self.router(x).float().softmax(-1)
        weight, expert = share.topk(2, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        order = expert.flatten().argsort(stable=True)
        token = order // 2
        counts = torch.bincount(expert.flatten(), minlength=num_experts)
        self.imbalance = num_experts * (counts / order.numel() * share.mean(0)).sum()
        dtype = torch.bfloat16 if torch.is_autocast_enabled(x.device.type) else x.dtype
        # unbind, not indexing: its gradient is one stack instead of a full tensor of zeros for each expert.
        matrices = zip(
            *(matrix.to(dtype).unbind(0) for matrix in (self.gate, self.up, self.down)), strict=True
        )
        inputs = x[token].to(dtype).split(counts.tolist())
        outputs = [
            F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), down)
            for rows, (gate, up, down) in zip(inputs, matrices, strict=True)
        ]
        mixed = torch.cat(outputs) * weight.flatten()[order, None].to(dtype)
        return torch.zeros_like(x, dtype=dtype).index_add(0, token, mixed).view(shape)


class Layer(nn.Module):
    """Attention and feed-forward, each on a normalised copy of its input and added to it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.norm_1, self.norm_2 = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.mlp = Experts(config) if config.num_experts else Dense(config)

    def forward(self, x: Tensor) -> Tensor:
        """x, result: (batch, length, width)."""
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class LanguageModel(nn.Module):
    """Bytes in, loss out. Matrices start normal with deviation 0.02, those that end a branch narrower with depth."""

    IMBALANCE_WEIGHT = 0.01

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                ends_branch = name.endswith(("out.weight", "down.weight", "mlp.down"))
                nn.init.normal_(parameter, std=0.02 / (2 * config.num_layers) ** 0.5 if ends_branch else 0.02)
            elif name.endswith("router.bias"):
                with torch.no_grad():
                    parameter.zero_()
                    parameter[-max(1, config.num_experts // 8) :] = Experts.IDLE_BIAS

    def forward(self, text: Tensor) -> Tensor:
        """The loss of predicting each byte but the first. text: int64, (batch, length + 1), length at most the context."""
        x = self.embedding(text[:, :-1]) + self.position.weight[: text.shape[1] - 1]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        for layer in self.layers:
            if isinstance(layer.mlp, Experts):
                loss = loss + self.IMBALANCE_WEIGHT * layer.mlp.imbalance
        return loss
