"""One of two processes that save sharded state as a stock DCP folder and as a thin folder: RANK, folder for the results."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from thinpoint.dcp import ThinWriter

WORLD_SIZE = 2


def full_state() -> dict[str, torch.Tensor]:
    """The tensors as a whole."""
    generator = torch.Generator().manual_seed(7)
    return {
        "rows": torch.randn(300, 40, generator=generator),
        "columns": torch.randn(60, 50, generator=generator),
        "uneven": torch.randn(7, 3, generator=generator).bfloat16(),
        "one": torch.randn(1, 4, generator=generator),
        "everywhere": torch.arange(11),
    }


PLACEMENTS = {
    "rows": Shard(0),
    "columns": Shard(1),
    "uneven": Shard(0),
    "one": Shard(0),
    "everywhere": Replicate(),
}


def main(rank: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", rank=rank, world_size=WORLD_SIZE, init_method=f"file://{folder}/rendezvous"
    )
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    tensors = {
        name: distribute_tensor(tensor, mesh, [PLACEMENTS[name]]) for name, tensor in full_state().items()
    }
    state = {"model": tensors, "groups": [{"lr": 0.1, "betas": (0.9, 0.95)}], "step": 7}
    dcp.save(state, checkpoint_id=os.path.join(folder, "stock"))
    dcp.save(state, storage_writer=ThinWriter(os.path.join(folder, "thin")))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), sys.argv[2])
