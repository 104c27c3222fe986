"""A tree of leaves as a PyTorch DCP folder: planned with stand-ins, each tensor read when it is written."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from thinpoint.errors import ThinpointError, UnsupportedObjectError, from_os_error
from thinpoint.formats.leaves import TensorLeaf, materialized
from thinpoint.formats.torch_source import is_plain_tensor
from thinpoint.state.tree import Path, display

Advance = Callable[[int], None]

FILE_BYTES = 512 << 20
"""Tensors in a file. PyTorch's writer holds all that it has written to a file until that is closed."""

_LEFT_OUT = object()
"""Stands for a value that is left out."""


@dataclass(frozen=True, kw_only=True)
class DcpState:
    """A tree as DCP takes it.

    Attributes:
        state: nested dicts and lists; tensors without elements stand for the leaves.
        leaves: by the names that DCP gives them.
        left_out: a line for each value that a DCP folder cannot hold.
    """

    state: dict[Any, Any]
    leaves: dict[str, TensorLeaf]
    left_out: list[str]


def dcp_state(tree: Any, *, where: str) -> DcpState:
    """A tree as DCP takes it; objects are loaded, tensors are not.

    Raises:
        UnsupportedObjectError: the tree is no dict.
        UnsafeObjectError: an object is pickled, and the checkpoint was opened without `allow_pickle`.
    """
    import torch

    if not isinstance(tree, dict):
        raise UnsupportedObjectError(
            "a DCP folder holds a dict", where=where, actual=type(tree).__name__, hint="Use --to pt"
        )
    found = DcpState(state={}, leaves={}, left_out=[])

    def node(below: Any, path: Path) -> Any:
        if isinstance(below, tuple):
            # DCP does not look into tuples: they are objects, tensors and all.
            return materialized(below)
        if isinstance(below, dict):
            values = {key: node(value, (*path, key)) for key, value in below.items()}
            return {key: value for key, value in values.items() if value is not _LEFT_OUT}
        if isinstance(below, list):
            positions = [node(value, (*path, i)) for i, value in enumerate(below)]
            return [None if value is _LEFT_OUT else value for value in positions]
        if isinstance(below, TensorLeaf):
            found.leaves[display(path)] = below
            return torch.empty(below.shape, dtype=below.dtype, device="meta")
        value = below.load()
        reason = _why_not(value)
        if reason is not None:
            found.left_out.append(f"{display(path)} ({reason})")
            return _LEFT_OUT
        return _dense(value)

    found.state.update(node(tree, ()))
    return found


def stock_writer(folder: str, target: str) -> Any:
    """PyTorch's own writer into a folder that is to be renamed to `target`. Holds FILE_BYTES of tensors, or the largest."""
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint.metadata import StorageMeta
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.futures import Future

    class Writer(FileSystemWriter):
        """Several files, one after the other; notes where the folder will be."""

        def write_data(self, plan: Any, planner: Any) -> Any:
            results = []
            for number, items in enumerate(_groups(plan.items)):
                prefix = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_")
                part = replace(plan, items=items, storage_data=prefix)
                results += super().write_data(part, planner).value()
            done: Future[list[WriteResult]] = Future()
            done.set_result(results)
            return done

        def storage_meta(self) -> StorageMeta | None:
            meta = super().storage_meta()
            return None if meta is None else replace(meta, checkpoint_id=target)

    return Writer(folder)


def _groups(items: list[Any]) -> list[list[Any]]:
    """The items of a plan in order, in lists of at most FILE_BYTES of tensors each, or one tensor."""
    groups: list[list[Any]] = [[]]
    held = 0
    for item in items:
        data = item.tensor_data
        size = 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
        if groups[-1] and held + size > FILE_BYTES:
            groups.append([])
            held = 0
        groups[-1].append(item)
        held += size
    return groups


def write_dcp(given: DcpState, writer: Any, advance: Advance, *, where: str) -> None:
    """Save through a DCP storage writer, in this process alone. Of tensors it holds what the writer asks for at a time.

    Args:
        writer: a `StorageWriter`: that of PyTorch, or `LeafWriter`.
        advance: called with bytes of tensors read for the planner since the call before.
        where: what messages call the target.

    Raises:
        UnsupportedObjectError: two names are the same text.
        StorageError: the system refused.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            # That there is no process group is no news here.
            warnings.simplefilter("ignore")
            planner = _planner(given.leaves, advance)
            dcp.save(given.state, storage_writer=writer, planner=planner, no_dist=True)
    except (Exception, CheckpointException) as error:
        # Not an `Exception`, and it holds that of the rank, which may be Ctrl-C.
        cause = _cause(error)
        if isinstance(cause, ThinpointError):
            raise cause from None
        if isinstance(cause, OSError):
            raise from_os_error(cause, "cannot write the folder", where=where) from error
        if isinstance(cause, ValueError) and "duplicated flatten key" in str(cause):
            raise UnsupportedObjectError(
                f"two values would have the same name in a DCP folder ({cause})", where=where
            ) from error
        raise cause from None


def _why_not(value: Any) -> str | None:
    """Why a DCP folder does not keep a value; None if it does."""
    import torch

    if type(value) is dict and not value:
        return "an empty dict"
    if isinstance(value, torch.Tensor) and not is_plain_tensor(_dense(value)):
        return "a tensor that is not plainly strided"
    return None


def _dense(value: Any) -> Any:
    """The value; a tensor with its lazy conjugation and negation done."""
    import torch

    plain_class = type(value) in (torch.Tensor, torch.nn.Parameter)
    return value.resolve_conj().resolve_neg() if plain_class else value


def _planner(leaves: dict[str, TensorLeaf], advance: Advance) -> Any:
    from torch.distributed.checkpoint import DefaultSavePlanner

    class Planner(DefaultSavePlanner):
        """Gives the tensor in place of the one that stands for it."""

        def resolve_data(self, write_item: Any) -> Any:
            leaf = leaves.get(write_item.index.fqn)
            if leaf is None:
                return super().resolve_data(write_item)
            advance(leaf.num_bytes)
            return leaf.load()

    return Planner()


def _cause(error: BaseException) -> BaseException:
    """The first error of a rank inside what DCP raises."""
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:
        found = next(iter(failures.values()))
        return found[0] if isinstance(found, tuple) else found
    return error
