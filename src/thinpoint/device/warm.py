"""Compiles the kernels that usual states need, so that the first save does not wait for the compiler.

    python -m thinpoint.device.warm

Triton keeps what it compiled in a folder of the user's (TRITON_CACHE_DIR), for all later processes of the same versions.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from thinpoint.codec.contract import PartSpec
from thinpoint.device.backend import TritonBackend
from thinpoint.device.contract import EncodeItem

KINDS = (
    "float32",
    "float32 positive",
    "bfloat16",
    "bfloat16 positive",
    "float32 of bfloat16",
    "float16",
    "float8_e4m3fn",
)
_ELEMS = 3 * 32768 + 1000
_ROW_ELEMS = 512


def warm_up(device: torch.device, kinds: tuple[str, ...] = KINDS) -> None:
    """Encode and decode a little of each kind on a device; blocks until the kernels are compiled.

    Args:
        device: as for `TritonBackend`.
        kinds: some of KINDS.
    """
    items = [item for kind in kinds for item in _items(kind, device)]
    TritonBackend(device, prove=True).encode_batch(items)


def _items(kind: str, device: torch.device) -> list[EncodeItem]:
    """Parts for which planning finds group means, and a column profile: both forms of the kernels."""
    dtype = kind.split(maxsplit=1)[0]
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(_ELEMS, generator=generator)
    groups = torch.exp2(4 * torch.randn(-(-_ELEMS // 256), generator=generator)).repeat_interleave(256)[
        :_ELEMS
    ]
    columns = torch.exp2(4 * torch.randn(_ROW_ELEMS, generator=generator)).repeat(-(-_ELEMS // _ROW_ELEMS))[
        :_ELEMS
    ]
    items = []
    for values in (noise * groups, noise * columns):
        if kind.endswith("positive"):
            values = values.abs()
        if kind.endswith("of bfloat16"):
            values = values.bfloat16()
        words = values.to(getattr(torch, dtype)).view(torch.uint8).to(device)
        role = "second_moment" if kind.endswith("positive") else "first_moment"
        spec = PartSpec(dtype=dtype, role=role, row_elems=_ROW_ELEMS)
        items.append(EncodeItem(words=words, word_bytes=words.numel() // _ELEMS, spec=spec))
    return items


def main() -> None:
    """Compile everything, several kinds at a time in processes of their own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=KINDS, help="only this kind, in this process")
    parser.add_argument(
        "--jobs", type=int, default=min(len(KINDS), os.cpu_count() or 1), help="processes at a time"
    )
    options = parser.parse_args()
    begin = time.perf_counter()
    if options.kind:
        warm_up(torch.device("cuda"), (options.kind,))
        return
    with ThreadPoolExecutor(options.jobs) as pool:
        commands = [[sys.executable, "-m", "thinpoint.device.warm", "--kind", kind] for kind in KINDS]
        for done in pool.map(lambda command: subprocess.run(command, check=True), commands):
            print(f"{done.args[-1]}: {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
