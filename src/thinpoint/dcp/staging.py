"""Asynchronous saves: a state dict encoded into host memory, to be written later."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.torch_version import TorchVersion

from thinpoint.collector import collector_paused
from thinpoint.dcp.items import chunk_path, file_object
from thinpoint.dcp.staged_file import plain
from thinpoint.dcp.staged_tensor import Payload, StagedChunk, StagedTensor
from thinpoint.engine.backends import choose_backends, codec_named
from thinpoint.engine.budget import host_memory_bytes
from thinpoint.engine.staged import encode_state
from thinpoint.engine.workers import Workers, checked_threads
from thinpoint.errors import UnsupportedError, UnsupportedObjectError, UsageError
from thinpoint.folder.layout import chunk_key
from thinpoint.state.flatten import flatten
from thinpoint.state.tensor_records import PLAIN_CLASSES
from thinpoint.state.tree import Path

StateDict = dict[str, Any]

_OLDEST_TORCH = "2.5"


class ThinStager(AsyncStager):
    """For `dcp.async_save(..., storage_writer=ThinWriter(...), async_stager=ThinStager())`: stages what is compressed.

    `stage` encodes every tensor, on its device where that has a backend, and copies the result to page-locked host
    memory, instead of the tensor itself. `ThinWriter` then writes it as it is. Only for `AsyncCheckpointerType.THREAD`: what is
    staged cannot go to another process.

    A tensor that every rank holds is encoded by every rank, as the plan that gives it to one of them comes later.

    Args:
        codec, backend, prove, num_threads: as for `thinpoint.save`. The codec must be the writer's.
        host_memory: bytes of host memory that the encoded tensors of a state may take; None for THINPOINT_HOST_MEMORY or half
            of what is free, divided by the ranks on this machine.

    Raises:
        UsageError: an option is not valid.
        UnsupportedError: torch is older than 2.5, whose planners do not ask a tensor for its chunks.
        BackendUnavailableError: the backend or codec asked for by name cannot run here.
    """

    _synchronize_after_execute = False

    def __init__(
        self,
        *,
        codec: str = "thin",
        backend: str = "auto",
        prove: bool | None = None,
        num_threads: int | None = None,
        host_memory: int | None = None,
    ) -> None:
        if TorchVersion(torch.__version__) < _OLDEST_TORCH:
            raise UnsupportedError(
                "asynchronous saves of many ranks need a newer torch",
                expected=f"at least {_OLDEST_TORCH}",
                actual=torch.__version__,
                hint="Save synchronously",
            )
        self._codec = codec_named(codec)
        self._backends = choose_backends(backend, codec=self._codec, prove=prove)
        self._num_threads = checked_threads(num_threads)
        self._host_memory = host_memory
        host_memory_bytes(host_memory)

    @collector_paused()
    def stage(self, state_dict: StateDict) -> StateDict:
        """A state dict of the same structure that no longer depends on this one, which may change on return.

        Tensors are replaced by `StagedTensor`s. Tensors that are not plainly strided are copied to the host as they are, and
        everything else by `copy.deepcopy`.

        Raises:
            NotEnoughMemoryError: the encoded tensors do not fit into `host_memory`.
            UnsupportedObjectError: something cannot be copied or stored; the message names it.
            StateChangedError: a tensor changed while it was being read.
        """
        collector = _Collector()
        staged = {key: collector.node(value, (key,)) for key, value in state_dict.items()}
        state = flatten(file_object(collector.tensors, {}), allow_pickle=False)
        with Workers(self._num_threads) as workers:
            encoded = encode_state(
                state, self._backends, workers, host_bytes=host_memory_bytes(self._host_memory)
            )
        for path, chunk in collector.chunks.items():
            chunk.payload = Payload(encoded, path, self._codec)
        return staged

    def synchronize_staging(self) -> None:
        """Nothing to wait for: `stage` returns when everything is staged."""

    def close(self) -> None:
        """Nothing to let go of: a staged state belongs to the save that writes it."""


class _Collector:
    """Goes through a state dict.

    Attributes:
        tensors: the chunks to encode, by name and key; laid out as in a rank's file.
        chunks: what stands for each, by its path there.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, dict[str, torch.Tensor]] = {}
        self.chunks: dict[Path, StagedChunk] = {}
        self._copied: dict[int, Any] = {}
        self._items: dict[Hashable, list[WriteItem]] = {}

    def node(self, value: Any, path: Path) -> Any:
        """What stands for a value; containers are gone through as DCP's planners do."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, ".".join(map(str, path)))
        if isinstance(value, Mapping):
            return {key: self.node(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list) and _leads_to_tensors(value):
            return [self.node(item, (*path, i)) for i, item in enumerate(value)]
        try:
            return copy.deepcopy(value, self._copied)
        except Exception as error:
            raise UnsupportedObjectError(
                f"{'.'.join(map(str, path))} is a {type(value).__name__} that cannot be copied: {error}"
            ) from error

    def _tensor(self, tensor: torch.Tensor, fqn: str) -> StagedTensor:
        if fqn in self.tensors:
            raise UsageError("two tensors of the state dict have the same name", tensor=fqn)
        items = self._items_of(tensor, fqn)
        to_encode = self.tensors[fqn] = {}
        chunks: dict[tuple[int, ...], torch.Tensor] = {}
        for item in items:
            chunk = plain(find_tensor_shard(tensor, item.index))
            offset = tuple(item.index.offset or ())
            if not _is_plain(chunk):
                chunks[offset] = _host_copy(chunk, fqn)
                continue
            to_encode[chunk_key(offset)] = chunk
            chunks[offset] = self.chunks[chunk_path(fqn, offset)] = StagedChunk(chunk)
        return StagedTensor(tensor, items, chunks)

    def _items_of(self, tensor: torch.Tensor, fqn: str) -> list[WriteItem]:
        """What DCP writes for a tensor; those that are sharded alike share it, with the name of the first."""
        if not hasattr(tensor, "placements"):
            return create_default_local_save_plan({fqn: tensor}, True).items
        sharding = (tensor.device_mesh, tuple(tensor.placements), tensor.shape)  # type: ignore[attr-defined]
        key = (type(tensor), *sharding, tensor.dtype, tensor.layout, tensor.requires_grad)
        if key not in self._items:
            self._items[key] = create_default_local_save_plan({fqn: tensor}, True).items
        return self._items[key]


def _leads_to_tensors(values: list[Any]) -> bool:
    """Whether a planner would go through this list, instead of taking it for one object."""
    return any(
        isinstance(value, (torch.Tensor, Mapping)) or (isinstance(value, list) and _leads_to_tensors(value))
        for value in values
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its elements in a storage, and strides, are all there is."""
    return (
        type(tensor) in PLAIN_CLASSES
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_quantized or tensor.is_nested)
    )


def _host_copy(tensor: torch.Tensor, fqn: str) -> torch.Tensor:
    try:
        return tensor.to("cpu", copy=True)
    except (NotImplementedError, RuntimeError) as error:
        raise UnsupportedObjectError(
            f"a {type(tensor).__name__} cannot be copied to the host: {error}", tensor=fqn
        ) from error
