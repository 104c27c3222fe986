"""The Triton backend: parts on a device to encoded parts in host memory, and back."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from thinpoint.codec import raw
from thinpoint.codec.backend import HostBackend, get_backend
from thinpoint.codec.contract import WORD_DTYPES, EncodedPart, serial_map
from thinpoint.codec.nvcomp import ANS_ID
from thinpoint.codec.plan import BLOCK_ELEMS
from thinpoint.codec.rans.spec import CODEC_ID as RANS_ID
from thinpoint.device.contract import DecodeItem, EncodeItem, at_item, item_named
from thinpoint.device.decoding import RansItems, describe_error, fits_device
from thinpoint.device.encoding import Batch
from thinpoint.device.kernels import fields as f
from thinpoint.device.prefixes import HostPlans, prefix_of
from thinpoint.device.tables import starts
from thinpoint.device.transfers import HostCopies, OutOfMemory, as_bytes, free_bytes, on_device
from thinpoint.device.triton_codec import DeviceCodec, DeviceWave, fill_words
from thinpoint.digest import digest
from thinpoint.errors import DigestMismatchError, MalformedFileError, ThinpointError, UsageError

log = logging.getLogger("thinpoint")

MAX_WAVE_ITEMS = 4096
_DIGEST_MASK = (1 << 64) - 1


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

    def encode_batch(self, items: Sequence[EncodeItem]) -> list[EncodedPart]:
        """See `DeviceBackend.encode_batch`."""
        with torch.no_grad(), on_device(self.device):
            return [part for wave in self._waves(items) for part in self._encode_wave(wave)]

    def _waves(self, items: Sequence[EncodeItem]) -> Iterator[list[EncodeItem]]:
        """Items in order, as many at a time as the memory allows."""
        available = int(0.8 * free_bytes(self.device))
        wave: list[EncodeItem] = []
        scratch = total = 0
        for item in items:
            own_scratch = self.codec.scratch_bytes(item)
            # The encoded part is at most as large as the item.
            own = own_scratch + item.words.numel()
            full = scratch + own_scratch > self.max_scratch_bytes or total + own > available
            if wave and (full or len(wave) == MAX_WAVE_ITEMS):
                yield wave
                wave, scratch, total = [], 0, 0
            wave.append(item)
            scratch, total = scratch + own_scratch, total + own
        if wave:
            yield wave

    def _encode_wave(self, items: Sequence[EncodeItem]) -> list[EncodedPart]:
        """A wave; where memory is short, half of it at a time; an item for which there is none is stored raw."""
        try:
            return self._to_host(self.codec.encode(items, digest=True, prove=self.prove))
        except OutOfMemory:
            pass
        # Outside of the handler: the exception would keep the wave's memory.
        if len(items) > 1:
            half = len(items) // 2
            return self._encode_wave(items[:half]) + self._encode_wave(items[half:])
        log.warning("no device memory to encode %d bytes: stored raw", items[0].words.numel())
        copies = HostCopies(self.device)
        words = copies.add(items[0].words)
        copies.wait()
        return [raw.encode_raw(words.view(WORD_DTYPES[items[0].word_bytes]), serial_map)]

    def _to_host(self, wave: DeviceWave) -> list[EncodedPart]:
        """Copy a wave to host memory; waits for the copies."""
        assert wave.raw_digests is not None
        items, outcome = wave.items, wave.outcome
        copies = HostCopies(self.device)
        raw_digests = copies.add(wave.raw_digests)
        coded = [_BatchCopy(self.codec, batch, copies) for batch in outcome.batches]
        plain = {i: copies.add(items[i].words) for i in (*outcome.raw, *outcome.host)}
        copies.wait()
        digests = [value & _DIGEST_MASK for value in raw_digests.tolist()]
        parts: dict[int, EncodedPart] = {}
        for batch in coded:
            parts.update(batch.parts(digests))
        for i, word in outcome.constants.items():
            parts[i] = _const_part(items[i], word, digests[i])
        for i in outcome.raw:
            parts[i] = raw.encode_raw(plain[i].view(WORD_DTYPES[items[i].word_bytes]), serial_map)
        for i in outcome.host:
            parts[i] = self._host.encode(plain[i].view(WORD_DTYPES[items[i].word_bytes]), items[i].spec)
        return [parts[i] for i in range(len(items))]

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
        sums = launcher.digests(
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
        sizes = [
            item.part.block_sizes[:, item.first_block : item.first_block + item.num_blocks] for item in items
        ]
        places = [
            offset + starts(row)
            for item, own in zip(items, sizes, strict=True)
            for offset, row in zip(item.plane_offsets, own, strict=True)
        ]
        size = np.concatenate([own.reshape(-1) for own in sizes]) if items else np.zeros(0, np.int64)
        place = np.concatenate(places) if places else np.zeros(0, np.int64)
        if size.size and int((place + size).max()) > stored.numel():
            raise UsageError("blocks lie outside of the buffer", expected=f"at most {stored.numel()} bytes")
        return self.codec.launcher.digests(stored.data_ptr() + place, size, np.zeros_like(size))

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


class _BatchCopy:
    """A batch on its way to host memory."""

    def __init__(self, codec: DeviceCodec, batch: Batch, copies: HostCopies) -> None:
        self._batch = batch
        host = batch.tables.host
        counts = batch.accepted[host.block_part]
        self._blocks = np.flatnonzero(counts)
        raw_sizes, raw_starts = host.raw_block_bytes[self._blocks], starts(host.raw_block_bytes)[self._blocks]
        sizes = np.stack([raw_sizes, batch.entropy_sizes[self._blocks]])
        entropy_starts = starts(batch.entropy_sizes)[self._blocks]
        self._sizes = sizes
        raw_plane = as_bytes(batch.raw)
        addresses = np.concatenate(
            [raw_plane.data_ptr() + raw_starts, batch.entropy.data_ptr() + entropy_starts]
        )
        self._digests = copies.add(
            codec.launcher.digests(addresses, sizes.reshape(-1), np.zeros(addresses.size, np.int64))
        )
        self._planes = (
            _copy_blocks(raw_plane, raw_starts, raw_sizes, copies),
            _copy_blocks(batch.entropy, entropy_starts, sizes[1], copies),
        )
        plans = batch.plans
        self._plans = HostPlans(
            means=copies.add(plans.means),
            profiles=copies.add(plans.profiles),
            freqs=copies.add(plans.freqs).reshape(-1, 256),
            patches=copies.add(batch.patches.sort().values),
        )

    def parts(self, raw_digests: Sequence[int]) -> Iterator[tuple[int, EncodedPart]]:
        """(index in the wave, part) of the parts that count. raw_digests: of the wave's parts."""
        batch = self._batch
        owner = batch.tables.host.block_part[self._blocks]
        digests = self._digests.view(np.uint64)[: 2 * owner.size].reshape(2, -1)
        for p in np.flatnonzero(batch.accepted):
            first, last = np.searchsorted(owner, [p, p + 1])
            row = batch.host_parts[p]
            prefix, chain = prefix_of(batch, int(p), self._plans)
            member = int(batch.members[p])
            yield (
                member,
                EncodedPart(
                    codec_id=RANS_ID,
                    word_bytes=int(row[f.WORD_BITS.value]) // 8,
                    num_elems=int(row[f.NUM_ELEMS.value]),
                    block_elems=BLOCK_ELEMS,
                    prefix=prefix,
                    block_sizes=self._sizes[:, first:last].copy(),
                    blocks=tuple(tuple(plane[first:last]) for plane in self._planes),
                    block_digests=digests[:, first:last].copy(),
                    raw_digest=raw_digests[member],
                    chain=chain,
                ),
            )


def _copy_blocks(
    plane: torch.Tensor, places: np.ndarray, sizes: np.ndarray, copies: HostCopies
) -> list[np.ndarray]:
    """Host views of blocks of a plane; neighbouring blocks are copied together."""
    blocks: list[np.ndarray] = []
    breaks = np.flatnonzero(places[1:] != (places + sizes)[:-1]) + 1
    for run in np.split(np.arange(places.size), breaks):
        if not run.size:
            continue
        start = int(places[run[0]])
        end = int(places[run[-1]] + sizes[run[-1]])
        memory = copies.add(plane[start:end])
        blocks += [
            memory[a - start : a - start + n]
            for a, n in zip(places[run].tolist(), sizes[run].tolist(), strict=True)
        ]
    return blocks


def _const_part(item: EncodeItem, word: int, raw_digest: int) -> EncodedPart:
    return EncodedPart(
        codec_id=raw.CONST_ID,
        word_bytes=item.word_bytes,
        num_elems=item.words.numel() // item.word_bytes,
        block_elems=BLOCK_ELEMS,
        prefix=word.to_bytes(item.word_bytes, "little"),
        block_sizes=np.zeros((0, 0), np.int64),
        raw_digest=raw_digest,
        chain="const",
    )
