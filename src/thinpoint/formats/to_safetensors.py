"""Tensors of any checkpoint as `.safetensors` files: one, or shards with an index as Hugging Face writes them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from thinpoint.engine.views import host_bytes
from thinpoint.file.dtypes import ITEM_BYTES
from thinpoint.file.json_text import dump_json
from thinpoint.formats.leaves import OpenCheckpoint, TensorLeaf, read_pieces
from thinpoint.formats.safetensors_header import METADATA_KEY, NAMES, make_header
from thinpoint.formats.safetensors_source import INDEX_NAMES
from thinpoint.formats.torch_source import expanded
from thinpoint.state.tree import display
from thinpoint.store import open_sink

SHARD_BYTES = 5_000_000_000
FORMAT = {"format": "pt"}
"""Metadata without which `transformers` refuses a file."""

Named = tuple[str, TensorLeaf]
Advance = Callable[[int], None]


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """What of a checkpoint fits into the format.

    Attributes:
        tensors: by the names they get.
        left_out: a line for each value that the format cannot hold.
    """

    tensors: dict[str, TensorLeaf]
    left_out: list[str] = field(default_factory=list)


def fitting(checkpoint: OpenCheckpoint) -> Fitting:
    """The tensors under flat names, the keys joined by dots, and what has to be left out."""
    found = Fitting(tensors={})
    for path, leaf in expanded(checkpoint.tree, skips_unsafe=True):
        name = display(path)
        if not isinstance(leaf, TensorLeaf):
            reason = "no plain tensor"
        elif leaf.dtype_name not in NAMES:
            reason = f"dtype {leaf.dtype_name}"
        elif leaf.dtype_name == "float4_e2m1fn_x2" and not leaf.shape:
            reason = "a scalar of float4_e2m1fn_x2"
        elif name == METADATA_KEY or name in found.tensors:
            reason = "its name cannot be used, or is another tensor's too"
        else:
            found.tensors[name] = leaf
            continue
        found.left_out.append(f"{name or '(the state)'} ({reason})")
    return found


def write_file(tensors: Sequence[Named], sink: Any, advance: Advance) -> None:
    """One file with these tensors, in order of falling element size, then of names, as its library writes them.

    Holds one piece of a tensor at a time.

    Args:
        advance: called with bytes written since the call before.
    """
    ordered = sorted(tensors, key=lambda item: (-ITEM_BYTES[item[1].dtype_name], item[0]))
    entries = [(name, leaf.dtype_name, leaf.shape, leaf.num_bytes) for name, leaf in ordered]
    sink.write(make_header(entries, FORMAT))
    for _, leaf in ordered:
        for piece in read_pieces(leaf):
            data = host_bytes(piece)
            sink.write(data)
            advance(data.size)


def write_shards(
    tensors: Sequence[Named], folder: str, advance: Advance, *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Files of at most `shard_bytes` of tensors each, a larger tensor alone in one, and their index."""
    shards: list[list[Named]] = [[]]
    size = 0
    for name, leaf in tensors:
        if shards[-1] and size + leaf.num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append((name, leaf))
        size += leaf.num_bytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= {name: file for name, _ in shard}
        with open_sink(os.path.join(folder, file), overwrite=False) as sink:
            write_file(shard, sink, advance)
    total = sum(leaf.num_bytes for _, leaf in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    with open_sink(os.path.join(folder, INDEX_NAMES[0]), overwrite=False) as sink:
        sink.write(dump_json(index))
