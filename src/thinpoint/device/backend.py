"""The Triton backend: parts on a device to encoded parts in host memory, and back."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import torch

from thinpoint.codec import raw
from thinpoint.codec.backend import HostBackend, get_backend
from thinpoint.codec.contract import WORD_DTYPES, EncodedPart
from thinpoint.codec.nvcomp import ANS_ID
from thinpoint.codec.rans.spec import CODEC_ID as RANS_ID
from thinpoint.device.contract import DecodeItem, EncodeItem, PendingParts, at_item, item_named
from thinpoint.device.decoding import RansItems, block_sizes, describe_error, fits_device
from thinpoint.device.encoding import Flight
from thinpoint.device.outgoing import Launched, Outgoing, OutgoingWave, OutgoingWords, Pending
from thinpoint.device.pinned import Arena, slab_pool
from thinpoint.device.ranges import digest_ranges
from thinpoint.device.tables import starts, starts_within
from thinpoint.device.transfers import HostCopies, OutOfMemory, free_bytes, on_device
from thinpoint.device.triton_codec import DeviceCodec, fill_words
from thinpoint.digest import digest
from thinpoint.errors import DigestMismatchError, MalformedFileError, ThinpointError, UsageError

log = logging.getLogger("thinpoint")

MAX_WAVE_ITEMS = 4096
_DIGEST_MASK = (1 << 64) - 1
_NO_SIZES = np.zeros(0, np.int64)


class TritonBackend:
    """See `contract.DeviceBackend`. Writes the same bytes as the CPU's backends.

    Args:
        device: a CUDA (or ROCm) device, or the CPU under Triton's interpreter.
        prove: decode everything that was encoded, on the device, and compare its bits before it leaves.
        max_scratch_bytes: device memory that encoding may take besides the encoded parts.
    """

    name = "triton"

    def __init__(self, device: torch.device, *, prove: bool = True, max_scratch_bytes: int = 1 << 30) -> None:
        self.device = device
        self.prove = prove
        self.max_scratch_bytes = max_scratch_bytes
        self.codec = DeviceCodec(device)
        self._host: HostBackend = get_backend("auto")
        self._under_way: weakref.WeakSet[Launched] = weakref.WeakSet()
        # Copies have a stream of their own: the next batch is encoded meanwhile.
        self._arena = Arena(slab_pool(is_pinned=device.type == "cuda"))
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def encode_batch(self, items: Sequence[EncodeItem]) -> list[EncodedPart]:
        """See `DeviceBackend.encode_batch`."""
        return self.begin_batch(items).parts()

    def begin_batch(self, items: Sequence[EncodeItem]) -> PendingParts:
        """See `DeviceBackend.begin_batch`."""
        begun: list[Outgoing] = []
        for wave, needed in self._waves(items):
            if begun:
                begun[-1].send()
            if len(begun) > 1:
                # The memory of one wave is free for the next.
                begun[-2].wait()
            begun.append(self._launch(wave, needed))
        return Pending(begun)

    def _waves(self, items: Sequence[EncodeItem]) -> Iterator[tuple[list[EncodeItem], int]]:
        """Items in order, as many at a time as the memory allows, and how much they need."""
        # A wave is proven when the next is being encoded.
        most_scratch = self.max_scratch_bytes // 2
        available = self._available()
        wave: list[EncodeItem] = []
        scratch = needed = 0
        for item in items:
            own_scratch = self.codec.scratch_bytes(item)
            # The encoded part is at most as large as the item, and what it decodes to as large.
            own = own_scratch + 2 * item.words.numel()
            full = scratch + own_scratch > most_scratch or needed + own > available
            if wave and (full or len(wave) == MAX_WAVE_ITEMS):
                yield wave, needed
                wave, scratch, needed = [], 0, 0
            wave.append(item)
            scratch, needed = scratch + own_scratch, needed + own
        if wave:
            yield wave, needed

    def _available(self) -> int:
        return int(0.8 * free_bytes(self.device))

    def _launch(self, items: Sequence[EncodeItem], needed: int) -> Launched:
        """Begin to encode a wave, or leave it to later if there is no memory for it."""
        if self._available() < 2 * needed:
            # Not beside others: these would be short of it when they are proven.
            for other in list(self._under_way):
                other.wait()
        flights: list[Flight] = []
        with torch.no_grad(), on_device(self.device), suppress(OutOfMemory):
            flights.append(self.codec.begin(items))
        launched = Launched(partial(self._send, items, flights), self.device)
        self._under_way.add(launched)
        return launched

    def _send(self, items: Sequence[EncodeItem], flights: list[Flight]) -> list[Outgoing]:
        """A wave on its way to the host; where memory is short, half of it at a time; an item for which there is none, raw.

        Args:
            flights: the wave, if it was launched; emptied, so that nobody else keeps its memory.
        """
        with torch.no_grad(), on_device(self.device):
            with suppress(OutOfMemory):
                return [self._outgoing(flights.pop() if flights else self.codec.begin(items))]
            if len(items) == 1:
                log.warning("no device memory to encode %d bytes: stored raw", items[0].words.numel())
                return [OutgoingWords(items[0], self._copies())]
            half = len(items) // 2
            first = self._send(items[:half], [])
            for each in first:
                each.wait()
            return first + self._send(items[half:], [])

    def _outgoing(self, flight: Flight) -> OutgoingWave:
        wave = self.codec.land(flight)
        return OutgoingWave(self.codec, wave, self._copies, self._host, prove=self.prove)

    def _copies(self) -> HostCopies:
        return HostCopies(self.device, self._copy_stream, self._arena)

    def decode_batch(self, data: torch.Tensor, items: Sequence[DecodeItem]) -> list[int]:
        """See `DeviceBackend.decode_batch`."""
        with torch.no_grad(), on_device(self.device):
            return self._decode_halving(data, items)

    def _decode_halving(self, data: torch.Tensor, items: Sequence[DecodeItem]) -> list[int]:
        """Where memory is short, half of the items at a time; an item for which there is none goes through the CPU."""
        try:
            return self._decode_batch(data, items)
        except OutOfMemory:
            pass
        if len(items) == 1:
            return [self._decode_on_host(data, items[0])]
        half = len(items) // 2
        first = self._decode_halving(data, items[:half])
        try:
            return first + self._decode_halving(data, items[half:])
        except ThinpointError as error:
            at_item(error, getattr(error, "item", 0) + half)
            raise

    def _decode_batch(self, data: torch.Tensor, items: Sequence[DecodeItem]) -> list[int]:
        launcher = self.codec.launcher
        stored = data.to(self.device, non_blocking=True) if self.device.type == "cuda" else data
        checks = self._stored_digests(stored, items)
        coded, plain, others = [], [], []
        for i, item in enumerate(items):
            codec_id = item.part.codec_id
            if codec_id == RANS_ID and fits_device(item.part):
                coded.append(i)
            elif codec_id in (raw.RAW_ID, raw.CONST_ID):
                plain.append(i)
            else:
                others.append(i)
        decoder = RansItems(launcher, items, coded) if coded else None
        errors = decoder.decode(stored) if decoder else launcher.zeros(0, torch.int32)
        for i in plain:
            with item_named(i):
                self._decode_plain(stored, items[i])
        outs = [item.out for item in items]
        sums = digest_ranges(
            launcher,
            np.array([out.data_ptr() for out in outs], np.int64),
            np.array([out.numel() for out in outs], np.int64),
            np.array([x.first_block * x.part.block_elems * x.part.word_bytes // 8 for x in items], np.int64),
        )
        copies = HostCopies(self.device)
        found, wrong, partial = copies.add(checks), copies.add(errors), copies.add(sums)
        copies.wait()
        self._check_stored(items, found)
        for i, code in zip(coded, wrong.tolist(), strict=False):
            if code:
                with item_named(i):
                    raise MalformedFileError(f"a block contradicts its prefix ({describe_error(code)})")
        results = [value & _DIGEST_MASK for value in partial.tolist()]
        self._decode_others(data, items, others, results)
        return results

    def _decode_others(
        self, data: torch.Tensor, items: Sequence[DecodeItem], others: list[int], results: list[int]
    ) -> None:
        """Items of codecs that have no kernels here."""
        ans = [i for i in others if items[i].part.codec_id == ANS_ID]
        if ans:
            from thinpoint.device.nvcomp import decode_items

            try:
                decoded = decode_items(data, [items[i] for i in ans])
            except ThinpointError as error:
                at_item(error, ans[getattr(error, "item", 0)])
                raise
            for i, value in zip(ans, decoded, strict=True):
                results[i] = value
        for i in others:
            if i not in ans:
                with item_named(i):
                    results[i] = self._decode_on_host(data, items[i])

    def _stored_digests(self, stored: torch.Tensor, items: Sequence[DecodeItem]) -> torch.Tensor:
        """int64: digests of all stored blocks of all items, planes one after the other."""
        size = np.concatenate([_NO_SIZES, *(block_sizes(item).reshape(-1) for item in items)])
        planes = [(item.num_blocks, offset) for item in items for offset in item.plane_offsets]
        num_blocks, offsets = np.array(planes, np.int64).reshape(-1, 2).T
        place = np.repeat(offsets, num_blocks) + starts_within(size, num_blocks)
        if size.size and int((place + size).max()) > stored.numel():
            raise UsageError("blocks lie outside of the buffer", expected=f"at most {stored.numel()} bytes")
        return digest_ranges(self.codec.launcher, stored.data_ptr() + place, size, np.zeros_like(size))

    def _check_stored(self, items: Sequence[DecodeItem], found: np.ndarray) -> None:
        expected = np.concatenate([item.digests.reshape(-1) for item in items]).astype(np.uint64)
        wrong = np.flatnonzero(found.view(np.uint64)[: expected.size] != expected)
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
                actual=f"{int(found.view(np.uint64)[wrong[0]]):016x}",
            )

    def _decode_plain(self, stored: torch.Tensor, item: DecodeItem) -> None:
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

    def _decode_on_host(self, data: torch.Tensor, item: DecodeItem) -> int:
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
        result = self._host.decode(item.part, item.first_block, blocks, words)
        item.out.copy_(torch.from_numpy(words.view(np.uint8)))
        return result


class PlainBackend(TritonBackend):
    """Stores words as they are: only copies them to the host, through page-locked memory."""

    name = "copies"

    def begin_batch(self, items: Sequence[EncodeItem]) -> PendingParts:
        """See `DeviceBackend.begin_batch`."""
        with torch.no_grad(), on_device(self.device):
            return Pending([OutgoingWords(item, self._copies()) for item in items])
