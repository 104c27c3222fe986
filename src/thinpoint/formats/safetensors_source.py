"""A `.safetensors` file, and a folder of them as Hugging Face writes it, as a tree of leaves."""

from __future__ import annotations

from contextlib import ExitStack, closing

from thinpoint.errors import MalformedFileError, NotFoundError, UnsupportedError
from thinpoint.file.json_text import parse_json
from thinpoint.formats.leaves import OpenCheckpoint, TensorLeaf
from thinpoint.formats.safetensors_file import contiguous_stride, read_header
from thinpoint.formats.safetensors_header import HeaderTensor
from thinpoint.formats.stored_elements import StoredElements
from thinpoint.store.contract import Source, Store

INDEX_NAMES = ("model.safetensors.index.json", "diffusion_pytorch_model.safetensors.index.json")
SUFFIX = ".safetensors"
MAX_INDEX_BYTES = 256 << 20


def open_safetensors(source: Source) -> OpenCheckpoint:
    """What a `.safetensors` file holds.

    Args:
        source: must stay open as long as the result is used.

    Raises:
        MalformedFileError, LimitExceededError, TruncatedFileError: no valid `.safetensors` file.
        UnsupportedError: a dtype that torch, or this version of it, does not have.
    """
    return OpenCheckpoint(
        name=source.name, kind="safetensors", tree=dict(_leaves(source)), num_bytes=source.size
    )


def is_hf_folder(names: set[str]) -> bool:
    """Whether the files of a folder, by name, are those of a model as Hugging Face stores it."""
    return bool(names & set(INDEX_NAMES)) or any(name.endswith(SUFFIX) for name in names)


def open_hf(store: Store, stack: ExitStack) -> OpenCheckpoint:
    """What a folder of `.safetensors` files holds: those that its index names, or all if it has none.

    Args:
        stack: closes the files.

    Raises:
        MalformedFileError, LimitExceededError: the index is damaged; it and the files differ; a name occurs twice.
        NotFoundError: a file that the index names is not there.
        And what `open_safetensors` raises.
    """
    names = {file.name for file in store.files() if "/" not in file.name}
    index_name = next((name for name in INDEX_NAMES if name in names), None)
    wanted = None if index_name is None else _weight_map(store, index_name)
    files = (
        sorted(set(wanted.values())) if wanted is not None else sorted(n for n in names if n.endswith(SUFFIX))
    )
    tree: dict[str, TensorLeaf] = {}
    num_bytes = 0
    for name in files:
        if name not in names:
            raise NotFoundError("a file that the index names is not there", where=f"{store.url}/{name}")
        source = stack.enter_context(closing(store.source(name)))
        num_bytes += source.size
        for key, leaf in _leaves(source):
            if wanted is not None and wanted.get(key) != name:
                continue
            if key in tree:
                raise MalformedFileError("two files hold a tensor of that name", where=store.url, tensor=key)
            tree[key] = leaf
    missing = set(wanted or {}) - set(tree)
    if missing:
        raise MalformedFileError(
            "tensors that the index names are in none of the files", where=store.url, tensor=min(missing)
        )
    return OpenCheckpoint(name=store.url, kind="hf", tree=tree, num_bytes=num_bytes)


def _weight_map(store: Store, index_name: str) -> dict[str, str]:
    where = f"{store.url}/{index_name}"
    value = parse_json(store.get(index_name, MAX_INDEX_BYTES), what="the index", where=where)
    found = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(found, dict):
        raise MalformedFileError("the index has no weight_map", where=where)
    for name in found.values():
        if not isinstance(name, str) or "/" in name or "\\" in name or not name.endswith(SUFFIX):
            raise MalformedFileError(
                "the index names something that is no file beside it", where=where, actual=ascii(name)[:80]
            )
    return found


def _leaves(source: Source) -> list[tuple[str, TensorLeaf]]:
    tensors, _, data_start = read_header(source)
    return [(tensor.name, _leaf(source, tensor, data_start)) for tensor in tensors]


def _leaf(source: Source, tensor: HeaderTensor, data_start: int) -> TensorLeaf:
    import torch

    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(
            f"this version of torch has no dtype {tensor.dtype}", where=source.name, tensor=tensor.name
        )
    elements = StoredElements(
        source=source,
        offset_bytes=data_start + tensor.start,
        dtype=dtype,
        shape=tensor.shape,
        stride=tuple(contiguous_stride(tensor.shape)),
    )
    return TensorLeaf(dtype=dtype, shape=tensor.shape, read=elements)
