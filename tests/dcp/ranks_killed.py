"""One of two ranks that save by plain `dcp.save`, of which one is killed: RANK, point, victim, folder."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from thinpoint.dcp import ThinWriter


class Killed(ThinWriter):
    """Kills its process at a point of a save."""

    def __init__(self, folder: Path, point: str) -> None:
        super().__init__(folder)
        self._point = point

    def _at(self, point: str) -> None:
        if point == self._point:
            os.kill(os.getpid(), signal.SIGKILL)

    def prepare_local_plan(self, plan: Any) -> Any:
        self._at("plan")
        return super().prepare_local_plan(plan)

    def write_data(self, plan: Any, planner: Any) -> Any:
        self._at("write")
        result = super().write_data(plan, planner)
        self._at("written")
        return result

    def put_manifest(self, manifest: Any, raw: bytes) -> None:
        self._at("manifest")
        super().put_manifest(manifest, raw)


def main() -> None:
    rank, point, victim, folder = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (2,))
    for number in (1, 2):
        state = {"w": distribute_tensor(torch.full((1000,), float(number)), mesh, [Shard(0)]), "n": number}
        checkpoint = folder / "checkpoint"
        writer = (
            ThinWriter(checkpoint) if number == 1 else Killed(checkpoint, point if rank == victim else "")
        )
        try:
            dcp.save(state, storage_writer=writer)
        except BaseException as error:  # noqa: BLE001
            print(number, type(error).__name__, flush=True)
            os._exit(3)


if __name__ == "__main__":
    main()
