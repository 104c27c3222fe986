"""A training loop as users write it, with a clock that sees what the device does."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from thinpoint.demo.corpus import corpus_bytes
from thinpoint.proof.model import LanguageModel
from thinpoint.proof.scale import Shape

_LEARNING_RATE = 3e-4
_WARM_UP_STEPS = 3


def synchronize(device: torch.device) -> None:
    """Waits for everything that was launched on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Marks:
    """Points in time: of the host for a CPU, of the device's current stream for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def now(self) -> Any:
        """The moment at which everything launched until now is done."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        """Blocks until that moment."""
        if self._on_gpu:
            mark.synchronize()

    def seconds(self, begin: Any, end: Any) -> float:
        """From one moment to another; waits for both."""
        self.wait(end)
        return begin.elapsed_time(end) / 1e3 if self._on_gpu else end - begin


class Clock:
    """The times at which the device finished its training steps. Keeps the host at most one step ahead of it.

    What the device waits for between two steps counts too.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._ends: list[Any] = []

    def __len__(self) -> int:
        """How many steps have been marked so far."""
        return max(0, len(self._ends) - 1)

    def mark(self) -> None:
        """Everything launched until now belongs to the step that ends here."""
        self._ends.append(self._marks.now())
        if len(self._ends) > 1:
            self._marks.wait(self._ends[-2])

    def intervals(self) -> list[float]:
        """Seconds from each mark to the next; waits for the device."""
        return [self._marks.seconds(a, b) for a, b in pairwise(self._ends)]


class Trainer:
    """A language model in training: AdamW, on a GPU under BF16 autocast; never waits for the device by itself.

    Args:
        shape: the model and its batches.
        device: a CPU or a CUDA device.
        max_bytes: text to train on.

    Attributes:
        marks: the clock of its device.
        updates: the moments before and after each `optimizer.step()` so far: where a save holds it back, it is between them.
    """

    def __init__(self, shape: Shape, device: torch.device, max_bytes: int) -> None:
        torch.manual_seed(0)
        self.shape, self.device = shape, device
        self.model = LanguageModel(shape).to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), fused=device.type == "cuda"
        )
        self.text = torch.frombuffer(bytearray(corpus_bytes(max_bytes)), dtype=torch.uint8).to(device)
        self.num_steps = 0
        self.marks = Marks(device)
        self.updates: list[tuple[Any, Any]] = []
        self._window = torch.arange(shape.context + 1, device=device)
        for _ in range(_WARM_UP_STEPS):
            self.step()
        synchronize(device)

    def set_batch(self, batch: int) -> None:
        """Other batches from here on."""
        self.shape = replace(self.shape, batch=batch)

    def step(self) -> None:
        """One training step."""
        last_start = len(self.text) - len(self._window)
        starts = torch.randint(last_start, (self.shape.batch, 1), device=self.device)
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self.model(self.text[starts + self._window].long())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        begin = self.marks.now()
        self.optimizer.step()
        self.updates.append((begin, self.marks.now()))
        self.num_steps += 1

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds; the tensors are the training's own, the dicts plain."""
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "step": self.num_steps,
        }

    @property
    def num_parameters(self) -> int:
        """Values that are trained."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors of a nested state."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(tensor_bytes(child) for child in children)


def copied(value: Any) -> Any:
    """A copy of a nested state whose tensors have memory of their own, on their devices."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(child) for key, child in value.items()}
    return type(value)(map(copied, value)) if isinstance(value, list | tuple) else value


def release(device: torch.device) -> None:
    """Gives back the memory that PyTorch's allocator keeps for later."""
    import gc

    gc.collect()
    if device.type == "cuda":
        synchronize(device)
        torch.cuda.empty_cache()
