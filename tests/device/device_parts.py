"""Helpers: parts for a device backend, and comparing what it makes with the CPU's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from thinpoint.codec.backend import get_backend
from thinpoint.codec.contract import EncodedPart, PartSpec
from thinpoint.device.contract import DecodeItem, EncodeItem
from thinpoint.digest import digest

POISON = 0xA5


def item_of(words: np.ndarray, spec: PartSpec, device: torch.device) -> EncodeItem:
    """Words on the device."""
    data = torch.from_numpy(words.view(np.uint8).copy()).to(device)
    return EncodeItem(words=data, word_bytes=words.itemsize, spec=spec)


def expect_same(part: EncodedPart, words: np.ndarray, spec: PartSpec) -> None:
    """The part is, in every byte, what the CPU's backend makes of the words."""
    expected = get_backend("cpu").encode(words, spec)
    assert (part.codec_id, part.chain) == (expected.codec_id, expected.chain)
    assert part.prefix == expected.prefix
    assert part.raw_digest == expected.raw_digest
    assert np.array_equal(part.block_sizes, expected.block_sizes)
    assert np.array_equal(part.block_digests, expected.block_digests)
    for plane, other in zip(part.blocks, expected.blocks, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(plane, other, strict=True))


def with_blocks(part: EncodedPart, blocks: Sequence[Sequence[np.ndarray]], **changes: Any) -> EncodedPart:
    """The part with other stored blocks, sizes and digests right for them: what somebody makes on purpose."""
    return replace(
        part,
        blocks=tuple(tuple(plane) for plane in blocks),
        block_sizes=np.array([[b.size for b in plane] for plane in blocks], np.int64),
        block_digests=np.array([[digest(b) for b in plane] for plane in blocks], np.uint64),
        **changes,
    )


def decode(
    backend: Any,
    parts: Sequence[EncodedPart],
    device: torch.device,
    ranges: Sequence[tuple[int, int]] | None = None,
) -> tuple[list[np.ndarray], list[int]]:
    """(bytes, partial digests) of block ranges of parts, all by default; the output is poisoned before."""
    stored: list[np.ndarray] = []
    items, outs = [], []
    offset = 0
    for part, (first, last) in zip(parts, ranges or [(0, p.num_blocks) for p in parts], strict=True):
        offsets = []
        for plane in part.blocks:
            offsets.append(offset)
            stored += plane[first:last]
            offset += sum(block.size for block in plane[first:last])
        start, end = first * part.block_elems, min(last * part.block_elems, part.num_elems)
        if not part.num_planes:
            start, end = 0, part.num_elems
        out = torch.full(((end - start) * part.word_bytes,), POISON, dtype=torch.uint8, device=device)
        outs.append(out)
        items.append(
            DecodeItem(
                part=part,
                first_block=first,
                num_blocks=last - first,
                plane_offsets=tuple(offsets),
                digests=part.block_digests[:, first:last],
                out=out,
            )
        )
    data = torch.from_numpy(np.concatenate(stored or [np.zeros(0, np.uint8)]))
    sums = backend.begin_decode(data, items)()
    return [out.cpu().numpy() for out in outs], sums
