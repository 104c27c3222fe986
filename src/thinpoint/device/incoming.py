"""Stored blocks on their way to tensors on the device, and the host's share of the work on them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from thinpoint.codec import raw
from thinpoint.codec.backend import HostBackend
from thinpoint.codec.contract import WORD_DTYPES
from thinpoint.codec.nvcomp import ANS_ID
from thinpoint.codec.rans.spec import CODEC_ID as RANS_ID
from thinpoint.device.contract import DecodeItem, at_item, item_named
from thinpoint.device.decoding import RansItems, block_sizes, describe_error, fits_device
from thinpoint.device.launch import Launcher
from thinpoint.device.ranges import digest_ranges
from thinpoint.device.tables import starts, starts_within
from thinpoint.device.transfers import HostCopies
from thinpoint.device.triton_codec import fill_words
from thinpoint.digest import digest
from thinpoint.errors import DigestMismatchError, MalformedFileError, ThinpointError, UsageError

_DIGEST_MASK = (1 << 64) - 1
_NO_SIZES = np.zeros(0, np.int64)


class Incoming:
    """A batch that is being decoded: launched when it is made, waited for with `results`.

    Args:
        launcher: whose device has the outputs.
        host: decodes what has no kernels here.
        data, items: see `DeviceBackend.begin_decode`.

    Raises:
        MalformedFileError: a part's description contradicts itself.
        torch.OutOfMemoryError: outputs may be partly written.
    """

    def __init__(
        self, launcher: Launcher, host: HostBackend, data: torch.Tensor, items: Sequence[DecodeItem]
    ) -> None:
        self._launcher, self._host = launcher, host
        self._data, self._items = data, items
        device = launcher.device
        stored = data.to(device, non_blocking=True) if device.type == "cuda" else data
        checks = self._stored_digests(stored)
        plain: list[int] = []
        self._coded: list[int] = []
        self._others: list[int] = []
        for i, item in enumerate(items):
            codec_id = item.part.codec_id
            if codec_id == RANS_ID and fits_device(item.part):
                self._coded.append(i)
            elif codec_id in (raw.RAW_ID, raw.CONST_ID):
                plain.append(i)
            else:
                self._others.append(i)
        decoder = RansItems(launcher, items, self._coded) if self._coded else None
        errors = decoder.decode(stored) if decoder else launcher.zeros(0, torch.int32)
        for i in plain:
            with item_named(i):
                _decode_plain(stored, items[i])
        outs = [item.out for item in items]
        sums = digest_ranges(
            launcher,
            np.array([out.data_ptr() for out in outs], np.int64),
            np.array([out.numel() for out in outs], np.int64),
            np.array([x.first_block * x.part.block_elems * x.part.word_bytes // 8 for x in items], np.int64),
        )
        self._copies = copies = HostCopies(device)
        self._found, self._wrong, self._partial = copies.add(checks), copies.add(errors), copies.add(sums)
        copies.begin()

    def results(self) -> list[int]:
        """What `begin_decode` promises; waits, and does what is left to the host."""
        self._copies.wait()
        self._check_stored()
        for i, code in zip(self._coded, self._wrong.tolist(), strict=False):
            if code:
                with item_named(i):
                    raise MalformedFileError(f"a block contradicts its prefix ({describe_error(code)})")
        results = [value & _DIGEST_MASK for value in self._partial.tolist()]
        self._decode_others(results)
        return results

    def _decode_others(self, results: list[int]) -> None:
        """Items of codecs that have no kernels here."""
        data, items = self._data, self._items
        ans = [i for i in self._others if items[i].part.codec_id == ANS_ID]
        if ans:
            from thinpoint.device.nvcomp import decode_items

            try:
                decoded = decode_items(data, [items[i] for i in ans])
            except ThinpointError as error:
                at_item(error, ans[getattr(error, "item", 0)])
                raise
            for i, value in zip(ans, decoded, strict=True):
                results[i] = value
        for i in self._others:
            if i not in ans:
                with item_named(i):
                    results[i] = decode_on_host(self._host, data, items[i])

    def _stored_digests(self, stored: torch.Tensor) -> torch.Tensor:
        """int64: digests of all stored blocks of all items, planes one after the other."""
        items = self._items
        size = np.concatenate([_NO_SIZES, *(block_sizes(item).reshape(-1) for item in items)])
        planes = [(item.num_blocks, offset) for item in items for offset in item.plane_offsets]
        num_blocks, offsets = np.array(planes, np.int64).reshape(-1, 2).T
        place = np.repeat(offsets, num_blocks) + starts_within(size, num_blocks)
        if size.size and int((place + size).max()) > stored.numel():
            raise UsageError("blocks lie outside of the buffer", expected=f"at most {stored.numel()} bytes")
        return digest_ranges(self._launcher, stored.data_ptr() + place, size, np.zeros_like(size))

    def _check_stored(self) -> None:
        items = self._items
        expected = np.concatenate([item.digests.reshape(-1) for item in items]).astype(np.uint64)
        found = self._found.view(np.uint64)[: expected.size]
        wrong = np.flatnonzero(found != expected)
        if not wrong.size:
            return
        ends = np.cumsum([item.digests.size for item in items])
        i = int(np.searchsorted(ends, wrong[0], side="right"))
        within = int(wrong[0]) - int(ends[i] - items[i].digests.size)
        plane, block = divmod(within, items[i].num_blocks)
        with item_named(i):
            raise DigestMismatchError(
                f"the checksum of plane {plane}, block {items[i].first_block + block} does not match",
                expected=f"{int(expected[wrong[0]]):016x}",
                actual=f"{int(found[wrong[0]]):016x}",
            )


def _decode_plain(stored: torch.Tensor, item: DecodeItem) -> None:
    """A part that is raw or constant."""
    part, out = item.part, item.out
    if part.codec_id == raw.CONST_ID:
        raw.check_const(part)
        fill_words(out, int.from_bytes(part.prefix, "little"), part.word_bytes)
        return
    raw.check_plain(part)
    block_bytes = part.block_elems * part.word_bytes
    sizes = part.block_sizes[0, item.first_block : item.first_block + item.num_blocks]
    lengths = np.minimum(block_bytes, out.numel() - np.arange(item.num_blocks) * block_bytes)
    if (sizes != -(-lengths // 8) * 8).any():
        raise MalformedFileError("a raw block has the wrong size")
    # Blocks are whole multiples of 8 bytes, so that only the last may have padding.
    out.copy_(stored[item.plane_offsets[0] :][: out.numel()])


def decode_on_host(host: HostBackend, data: torch.Tensor, item: DecodeItem) -> int:
    """What has no kernel here: zstd, unusual segments, and everything when memory is short."""
    blocks = []
    last = item.first_block + item.num_blocks
    for plane, offset in enumerate(item.plane_offsets):
        sizes = item.part.block_sizes[plane, item.first_block : last]
        places = offset + starts(sizes)
        own = [data[a : a + n].numpy() for a, n in zip(places.tolist(), sizes.tolist(), strict=True)]
        for block, expected in zip(own, item.digests[plane].tolist(), strict=True):
            if digest(block) != expected:
                raise DigestMismatchError(
                    f"the checksum of a block in plane {plane} does not match",
                    expected=f"{expected:016x}",
                    actual=f"{digest(block):016x}",
                )
        blocks.append(own)
    words = np.empty(item.out.numel() // item.part.word_bytes, WORD_DTYPES[item.part.word_bytes])
    result = host.decode(item.part, item.first_block, blocks, words)
    item.out.copy_(torch.from_numpy(words.view(np.uint8)))
    return result
