"""The role of a tensor, from its place in the state. Torch-free. Decides size, never exactness."""

from __future__ import annotations

import re
from collections.abc import Mapping

from thinpoint.state.tree import Path

WEIGHT = "weight"
FIRST_MOMENT = "first_moment"
SECOND_MOMENT = "second_moment"
GRADIENT = "gradient"
OTHER = "other"

_FLOAT_PREFIXES = ("float", "bfloat", "complex")

# Names that mean the same wherever they stand: PyTorch's optimizers, Megatron, DeepSpeed.
_ALWAYS: dict[str, str] = {
    **dict.fromkeys(
        ("exp_avg", "momentum_buffer", "grad_avg", "exp_inf_first", "momentum_buffers"), FIRST_MOMENT
    ),
    **dict.fromkeys(
        (
            "exp_avg_sq",
            "max_exp_avg_sq",
            "exp_avg_sq_row",
            "exp_avg_sq_col",
            "square_avg",
            "exp_inf",
            "acc_delta",
        ),
        SECOND_MOMENT,
    ),
    **dict.fromkeys(
        (
            "master",
            "master_param",
            "master_params",
            "master_weight",
            "main_param",
            "fp32_param",
            "fp32 param",
        ),
        WEIGHT,
    ),
    **dict.fromkeys(("grad", "grads", "gradient", "gradients", "main_grad"), GRADIENT),
}

# Names that say something only inside an optimizer's state.
_IN_OPTIMIZER: dict[str, str] = {
    **dict.fromkeys(("m", "mu", "momentum", "state1", "ax"), FIRST_MOMENT),
    **dict.fromkeys(("v", "nu", "sum", "state2"), SECOND_MOMENT),
    **dict.fromkeys(("param", "params", "fp32"), WEIGHT),
    **dict.fromkeys(("step", "mu_product"), OTHER),
}

_OPTIMIZER_WORD = re.compile(r"optim(izer)?s?(_states?|_?[0-9]+)?")


def is_optimizer_state(state: Mapping[object, object]) -> bool:
    """Whether a dict has the form of an optimizer's `state_dict()`."""
    return "state" in state and "param_groups" in state


def role_of(path: Path, dtype: str, *, in_optimizer: bool = False) -> str:
    """The role of the tensor at `path`.

    Args:
        path: keys from the root; dotted ones (DCP, Megatron: "optimizer.state.exp_avg.decoder.weight") are split.
        dtype: torch's name without `torch.`.
        in_optimizer: whether the path leads through a dict for which `is_optimizer_state` holds.
    """
    if not dtype.startswith(_FLOAT_PREFIXES):
        return OTHER
    words: list[str] = []
    for key in reversed(path):
        for word in reversed(str(key).lower().split(".")):
            if word in _ALWAYS:
                return _ALWAYS[word]
            words.append(word)
    for word in words:
        if word in _IN_OPTIMIZER and (in_optimizer or any(map(_OPTIMIZER_WORD.fullmatch, words))):
            return _IN_OPTIMIZER[word]
    return WEIGHT
