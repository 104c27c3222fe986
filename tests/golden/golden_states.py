"""The states behind the golden files, made by integer arithmetic alone so that they are the same for ever.

    python tests/golden/golden_states.py FOLDER [cuda]

writes the files of this version into an empty folder, on the CPU or on a GPU. A file that is committed is never rewritten: a
new format or encoder version adds files.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def noise(count: int, seed: int) -> np.ndarray:
    """uint64 noise: splitmix64 of seed, seed + 1, ... (S. Vigna, public domain algorithm)."""
    with np.errstate(over="ignore"):
        z = (np.arange(count, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def bell(count: int, seed: int) -> np.ndarray:
    """float64 of roughly normal distribution and standard deviation 1/64: sums of 16-bit integers, exact."""
    total = sum((noise(count, seed * 16 + i) & np.uint64(0xFFFF)).astype(np.int64) - 0x8000 for i in range(4))
    return total / float(1 << 22)


def tensor(values: np.ndarray, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32)).to(dtype).reshape(*shape)


def float_state() -> dict[str, Any]:
    """Every chain for floats: trailing zeros, zero groups, group means, column profile, patches, one symbol, const, raw."""
    rows, width = 96, 192
    scale = np.ldexp(1.0, (noise(width, 1) & np.uint64(15)).astype(np.int64) - 8)
    depth = np.ldexp(1.0, (noise(rows, 2) & np.uint64(7)).astype(np.int64) - 4)
    v = (bell(rows * width, 3).reshape(rows, width) * scale * depth[:, None]) ** 2
    m = bell(rows * width, 4).reshape(rows, width) * depth[:, None]
    m[8:40] = 0
    w = bell(rows * width, 5)
    outliers = w.copy()
    outliers[::701] *= 2.0**90
    bits = noise(3000, 6)
    rare = noise(300_001, 11)
    for seed in range(12, 16):
        rare &= noise(300_001, seed)
    rare = (rare & np.uint64(0x7F)).astype(np.uint8)
    return {
        "w": tensor(w, torch.float32, rows, width),
        "upcast": tensor(w, torch.bfloat16, rows, width).float(),
        "outliers": tensor(outliers, torch.float32, -1),
        "exp_avg": tensor(m, torch.float32, rows, width),
        "exp_avg_sq": tensor(v, torch.float32, rows, width),
        "grad": tensor(m, torch.bfloat16, rows, width),
        "half": tensor(w, torch.float16, rows, width),
        "double": tensor(w[:4608], torch.float32, 24, width).double() / 3,
        "complex": torch.view_as_complex(tensor(w[:4096], torch.float32, 2048, 2)),
        "float8": torch.from_numpy((noise(5000, 7) & noise(5000, 8) & np.uint64(0x3F)).astype(np.uint8)).view(
            torch.float8_e4m3fn
        ),
        "mantissas": torch.from_numpy(
            ((bits & np.uint64(0xFFFFF)) | np.uint64(0x3F800000)).astype(np.uint32).view(np.float32)
        ),
        "ones": torch.full((700, 3), 1.5),
        "zeros": torch.zeros(5000),
        "random": torch.from_numpy(noise(600, 9).astype(np.uint32).view(np.float32)),
        "norm": torch.from_numpy((1 + bell(100, 10)).astype(np.float32)),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "long": torch.from_numpy(rare).view(torch.float8_e5m2),
    }


def other_state() -> dict[str, Any]:
    """Integers, text and structure: the zstd chain and the tree."""
    ints = torch.arange(5000, dtype=torch.int64) * 3
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    return {
        "ints": ints,
        "mask": (ints % 7) < 3,
        "bytes": bytes(range(256)) * 20,
        "base": base,
        "view": base.t()[1:3],
        "parameter": torch.nn.Parameter(base.clone()),
        "tree": [
            1,
            2.5,
            None,
            True,
            "text",
            (1, "x"),
            {"a.b": 1, 7: "seven"},
            float("inf"),
            2**70,
            {3, 1, 2},
        ],
        "array": np.arange(12, dtype=">i4").reshape(3, 4),
    }


def segment_state() -> dict[str, Any]:
    """Whole segments of the usual dtypes: what the fast kernels take."""
    rows, width = 140, 512
    scale = np.ldexp(1.0, (noise(width, 21) & np.uint64(7)).astype(np.int64) - 4)
    m = bell(rows * width, 22).reshape(rows, width) * scale
    return {
        "w": tensor(bell(rows * width, 23), torch.float32, rows, width),
        "exp_avg": tensor(m, torch.float32, rows, width),
        "exp_avg_sq": tensor(m * m, torch.float32, rows, width),
        "grad": tensor(bell(rows * width, 24), torch.bfloat16, rows, width),
    }


def on(device: str, state: Any) -> Any:
    """The state with its tensors on a device."""
    return {key: value.to(device) for key, value in state.items()}


FILES = {
    "floats-v0.thin": float_state,
    "others-v0.thin": other_state,
    "floats-v1.thin": float_state,
    "others-v1.thin": other_state,
    "segments-v1.thin": segment_state,
    "floats-v1-h200.thin": float_state,
    "segments-v1-h200.thin": segment_state,
}
"""The files of a version, and those that a GPU wrote."""

if __name__ == "__main__":
    import thinpoint

    folder, device = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "cpu"
    for name, make in FILES.items():
        if "-v1" in name and ("-h200" in name) == (device == "cuda"):
            state = make() if device == "cpu" else on(device, make())
            print(thinpoint.save(state, folder / name, overwrite=False))
