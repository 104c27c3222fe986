"""Encoded waves on their way to host memory, and the host's share of the work on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Protocol

import numpy as np
import torch

from thinpoint.codec import raw
from thinpoint.codec.backend import HostBackend
from thinpoint.codec.contract import WORD_DTYPES, EncodedPart, serial_map
from thinpoint.codec.plan import BLOCK_ELEMS
from thinpoint.codec.rans.spec import CODEC_ID as RANS_ID
from thinpoint.device.contract import EncodeItem
from thinpoint.device.encoding import Batch
from thinpoint.device.kernels import fields as f
from thinpoint.device.launch import Launcher
from thinpoint.device.prefixes import HostPlans, prefix_of
from thinpoint.device.ranges import digest_ranges
from thinpoint.device.tables import starts
from thinpoint.device.transfers import HostCopies, Pieces, as_bytes
from thinpoint.device.triton_codec import DeviceCodec, DeviceWave

_DIGEST_MASK = (1 << 64) - 1


class Outgoing(Protocol):
    """Parts on their way."""

    @property
    def stored_bytes(self) -> int:
        """About how much host memory they take."""
        ...

    def send(self) -> None:
        """Begin to copy them, if that was not begun; waits until they are encoded."""
        ...

    def wait(self) -> None:
        """Wait until their bytes are in host memory; gives the device's memory back."""
        ...

    def parts(self) -> list[EncodedPart]:
        """The parts, in order; waits, and does what is left to the host."""
        ...


class Pending:
    """Several waves one after another; see `contract.PendingParts`."""

    def __init__(self, waves: Sequence[Outgoing]) -> None:
        self._waves = waves

    @property
    def stored_bytes(self) -> int:
        return sum(wave.stored_bytes for wave in self._waves)

    def send(self) -> None:
        for wave in self._waves:
            wave.send()

    def wait(self) -> None:
        for wave in self._waves:
            wave.wait()

    def parts(self) -> list[EncodedPart]:
        return [part for wave in self._waves for part in wave.parts()]


class Launched:
    """A wave that is being encoded.

    Args:
        send: waits for it and begins to copy it. Called once, with the stream that is current now.
        device: where it is.
    """

    def __init__(self, send: Callable[[], list[Outgoing]], device: torch.device) -> None:
        self._send: Callable[[], list[Outgoing]] | None = send
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._sent = Pending(())

    @property
    def stored_bytes(self) -> int:
        """See `Outgoing.stored_bytes`."""
        self.send()
        return self._sent.stored_bytes

    def send(self) -> None:
        """See `Outgoing.send`."""
        send, self._send = self._send, None
        if send is not None:
            with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                self._sent = Pending(send())

    def wait(self) -> None:
        """See `Outgoing.wait`."""
        self.send()
        self._sent.wait()

    def parts(self) -> list[EncodedPart]:
        """See `Outgoing.parts`."""
        self.send()
        return self._sent.parts()


class OutgoingWords:
    """A single part that is stored as it is."""

    def __init__(self, item: EncodeItem, copies: HostCopies) -> None:
        self._word_bytes = item.word_bytes
        self._copies = copies
        self._words = copies.add_whole(item.words)
        copies.begin()

    @property
    def stored_bytes(self) -> int:
        return self._words.size

    def send(self) -> None:
        pass

    def wait(self) -> None:
        self._copies.wait()

    def parts(self) -> list[EncodedPart]:
        self.wait()
        return [_raw_part(self._words, self._word_bytes)]


class OutgoingWave:
    """What a device encoded: its planes are copied while it still proves and digests them.

    Args:
        wave: for which nobody vouched yet.
        make_copies: gives what copies.
        host: encodes the parts that the device left to it.
        prove: see `DeviceCodec.vouch`.
    """

    def __init__(
        self,
        codec: DeviceCodec,
        wave: DeviceWave,
        make_copies: Callable[[], HostCopies],
        host: HostBackend,
        *,
        prove: bool,
    ) -> None:
        self._codec, self._make_copies, self._host = codec, make_copies, host
        items, outcome = wave.items, wave.outcome
        self._batches = [_BatchCopy(batch, make_copies()) for batch in outcome.batches]
        codec.vouch(wave, prove=prove)
        assert wave.raw_digests is not None
        self._copies = copies = make_copies()
        self._plain: dict[int, np.ndarray] = {}
        for i in (*outcome.raw, *outcome.host):
            self._add_plain(i, items[i].words, copies)
        for batch in self._batches:
            batch.digest(codec.launcher, copies)
        self._raw_digests = copies.add(wave.raw_digests)
        self._proofs = [copies.add(proof) for proof in wave.proofs]
        copies.begin()
        self._raw, self._constants = outcome.raw, outcome.constants
        self._shapes = [(item.words.numel(), item.word_bytes, item.spec) for item in items]
        # What is copied must not be given to others before.
        self._wave: DeviceWave | None = wave

    @property
    def stored_bytes(self) -> int:
        """See `Outgoing.stored_bytes`."""
        coded = sum(batch.stored_bytes for batch in self._batches)
        return coded + sum(words.size for words in self._plain.values())

    def send(self) -> None:
        """See `Outgoing.send`."""

    def wait(self) -> None:
        """See `Outgoing.wait`."""
        for batch in self._batches:
            batch.wait()
        self._copies.wait()
        wave, self._wave = self._wave, None
        if wave is not None:
            copies = self._make_copies()
            for i in self._codec.reject(wave, self._proofs):
                self._add_plain(i, wave.items[i].words, copies)
            copies.wait()

    def _add_plain(self, i: int, words: torch.Tensor, copies: HostCopies) -> None:
        self._plain[i] = copies.add_whole(words)

    def parts(self) -> list[EncodedPart]:
        """See `Outgoing.parts`."""
        self.wait()
        digests = [value & _DIGEST_MASK for value in self._raw_digests.tolist()]
        parts: dict[int, EncodedPart] = {}
        for batch in self._batches:
            parts.update(batch.parts(digests))
        for i, word in self._constants.items():
            num_bytes, word_bytes, _ = self._shapes[i]
            parts[i] = _const_part(num_bytes, word_bytes, word, digests[i])
        for i, words in self._plain.items():
            _, word_bytes, spec = self._shapes[i]
            if i in self._raw:
                parts[i] = _raw_part(words, word_bytes)
            else:
                parts[i] = self._host.encode(words.view(WORD_DTYPES[word_bytes]), spec)
        return [parts[i] for i in range(len(self._shapes))]


class _BatchCopy:
    """A batch on its way to host memory."""

    def __init__(self, batch: Batch, copies: HostCopies) -> None:
        host = batch.tables.host
        self._accepted, self._members = batch.accepted, batch.members
        self._rows, self._assumptions = batch.host_parts, batch.assumptions
        blocks = np.flatnonzero(batch.accepted[host.block_part])
        raw_sizes, raw_starts = host.raw_block_bytes[blocks], starts(host.raw_block_bytes)[blocks]
        sizes = np.stack([raw_sizes, batch.entropy_sizes[blocks]])
        entropy_starts = starts(batch.entropy_sizes)[blocks]
        self._sizes = sizes
        self.stored_bytes = int(sizes.sum() + batch.prefix_bytes[batch.accepted].sum())
        self._owner = host.block_part[blocks]
        raw_plane = as_bytes(batch.raw)
        self._addresses = np.concatenate(
            [raw_plane.data_ptr() + raw_starts, batch.entropy.data_ptr() + entropy_starts]
        )
        self._planes = (
            _copy_blocks(raw_plane, raw_starts, raw_sizes, copies),
            _copy_blocks(batch.entropy, entropy_starts, sizes[1], copies),
        )
        self._cuts = np.cumsum(batch.plans.layout)[:2]
        self._numbers = copies.add(batch.plans.numbers)
        self._patches = copies.add(batch.patches)
        self._digests = np.zeros(0, np.int64)
        self._copies = copies
        copies.begin(after=batch.encoded)

    def digest(self, launcher: Launcher, copies: HostCopies) -> None:
        """Digest what is copied, and copy that too."""
        sizes = self._sizes.reshape(-1)
        self._digests = copies.add(digest_ranges(launcher, self._addresses, sizes, np.zeros_like(sizes)))

    def wait(self) -> None:
        """Wait for the copies of planes."""
        self._copies.wait()

    def parts(self, raw_digests: Sequence[int]) -> Iterator[tuple[int, EncodedPart]]:
        """(index in the wave, part) of the parts that count. raw_digests: of the wave's parts."""
        digests = self._digests.view(np.uint64)[: 2 * self._owner.size].reshape(2, -1)
        planes = [[block for pieces in plane for block in pieces.cut()] for plane in self._planes]
        plans = HostPlans.of(self._numbers, self._cuts, self._patches)
        rows, members = self._rows.tolist(), self._members.tolist()
        first_blocks = np.searchsorted(self._owner, np.arange(len(rows) + 1)).tolist()
        for p in np.flatnonzero(self._accepted).tolist():
            row, member = rows[p], members[p]
            prefix, chain = prefix_of(row, self._assumptions[p], p, plans)
            blocks = slice(first_blocks[p], first_blocks[p + 1])
            yield (
                member,
                EncodedPart(
                    codec_id=RANS_ID,
                    word_bytes=row[f.WORD_BITS.value] // 8,
                    num_elems=row[f.NUM_ELEMS.value],
                    block_elems=BLOCK_ELEMS,
                    prefix=prefix,
                    block_sizes=self._sizes[:, blocks].copy(),
                    blocks=tuple([tuple(plane[blocks]) for plane in planes]),
                    block_digests=digests[:, blocks].copy(),
                    raw_digest=raw_digests[member],
                    chain=chain,
                ),
            )


def _copy_blocks(
    plane: torch.Tensor, places: np.ndarray, sizes: np.ndarray, copies: HostCopies
) -> list[Pieces]:
    """Host memory for blocks of a plane; neighbouring blocks are copied together."""
    blocks: list[Pieces] = []
    breaks = np.flatnonzero(places[1:] != (places + sizes)[:-1]) + 1
    for run in np.split(np.arange(places.size), breaks):
        if not run.size:
            continue
        start, end = int(places[run[0]]), int(places[run[-1]] + sizes[run[-1]])
        blocks.append(copies.add_pieces(plane[start:end], sizes[run]))
    return blocks


def _raw_part(words: np.ndarray, word_bytes: int) -> EncodedPart:
    """A part of words (uint8, nobody else's) as they are."""
    return raw.encode_raw(words.view(WORD_DTYPES[word_bytes]), serial_map, is_private=True)


def _const_part(num_bytes: int, word_bytes: int, word: int, raw_digest: int) -> EncodedPart:
    return EncodedPart(
        codec_id=raw.CONST_ID,
        word_bytes=word_bytes,
        num_elems=num_bytes // word_bytes,
        block_elems=BLOCK_ELEMS,
        prefix=word.to_bytes(word_bytes, "little"),
        block_sizes=np.zeros((0, 0), np.int64),
        raw_digest=raw_digest,
        chain="const",
    )
