"""The codec on a device: waves of parts are encoded and stay there, proven if asked for, until they are copied to the host."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from thinpoint.device.contract import EncodeItem
from thinpoint.device.decoding import decode_encoded
from thinpoint.device.encoding import Batch, Encoder, Flight, Outcome
from thinpoint.device.kernels import fields as f
from thinpoint.device.launch import ALIGNMENT, Launcher
from thinpoint.device.ranges import compare_ranges, digest_ranges
from thinpoint.device.tables import starts

log = logging.getLogger("thinpoint")

PART_SCRATCH_BYTES = 48 << 10
"""Histograms and tables of a part."""


@dataclass(kw_only=True)
class DeviceWave:
    """Encoded parts on the device.

    Attributes:
        items: what was encoded.
        outcome: how each part is stored.
        raw_digests: int64[items] on the device, digests of the parts' words; None unless `vouch` made them.
        proofs: for each batch of the outcome int32[parts] on the device, 0 where a part that counts decodes to its own bits;
            empty unless `vouch` made them.
    """

    items: Sequence[EncodeItem]
    outcome: Outcome
    raw_digests: torch.Tensor | None = None
    proofs: list[torch.Tensor] = field(default_factory=list)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all prefixes and planes; parts left to the host count as they are."""
        total = sum(int(batch.stored_bytes()[batch.accepted].sum()) for batch in self.outcome.batches)
        total += sum(self.items[i].word_bytes for i in self.outcome.constants)
        return total + sum(self.items[i].words.numel() for i in (*self.outcome.raw, *self.outcome.host))


class DeviceCodec:
    """Encodes and decodes parts on one device, on its current stream.

    Args:
        device: a CUDA (or ROCm) device; the CPU under Triton's interpreter.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.launcher = Launcher(device)
        self._encoder = Encoder(self.launcher)

    def scratch_bytes(self, item: EncodeItem) -> int:
        """Device memory that encoding an item takes besides the encoded part: words, tables, means, lists."""
        return _scratch_bytes(item.words.numel() // item.word_bytes, 1)

    def encode(self, items: Sequence[EncodeItem], *, digest: bool = True, prove: bool = True) -> DeviceWave:
        """Encode parts in one wave. Waits for the device once for the sizes, and once more for a proof.

        Args:
            digest: digest the words of all parts.
            prove: decode what was encoded and compare bits; a part that differs is logged and stored raw.

        Raises:
            StateChangedError: words changed meanwhile.
            torch.OutOfMemoryError: there was no memory for a wave of this size; nothing was changed.
        """
        wave = self.land(self.begin(items))
        self.vouch(wave, digest=digest, prove=prove)
        unproven = self.reject(wave, [proof.cpu().numpy() for proof in wave.proofs])
        if unproven and wave.raw_digests is not None:
            members = np.array(unproven)
            wave.raw_digests[self.launcher.upload(members)] = self._digests(items, members)
        return wave

    def begin(self, items: Sequence[EncodeItem]) -> Flight:
        """Launch the encoding of parts without waiting, so that the device has the next wave when this one is done."""
        return self._encoder.begin(items)

    def land(self, flight: Flight) -> DeviceWave:
        """The wave that `begin` launched, without digests and proofs; waits until it is encoded. Errors as `encode`."""
        return DeviceWave(items=flight.items, outcome=self._encoder.finish(flight))

    def vouch(self, wave: DeviceWave, *, digest: bool = True, prove: bool = True) -> None:
        """Launch digests and proofs; arguments as `encode`. `reject` is to be called with what the proofs find."""
        items, outcome = wave.items, wave.outcome
        digests = self.launcher.zeros(len(items), torch.int64) if digest else None
        if digests is not None:
            has_digest = np.zeros(len(items), bool)
            has_digest[list(outcome.constants)] = True
            for batch in outcome.batches if prove else ():
                has_digest[batch.members[batch.accepted]] = True
            others = np.flatnonzero(~has_digest)
            if others.size:
                digests[self.launcher.upload(others)] = self._digests(items, others)
            for i, word in outcome.constants.items():
                digests[i : i + 1] = self._constant_digest(items[i], word)
        wave.raw_digests = digests
        wave.proofs = [self._prove(items, batch, digests) for batch in outcome.batches] if prove else []

    def reject(self, wave: DeviceWave, proofs: Sequence[np.ndarray]) -> list[int]:
        """Log parts that did not decode to their own bits, and store them raw; returns their indices in the wave.

        Args:
            proofs: those of the wave, in host memory.
        """
        rejected = []
        for batch, wrong in zip(wave.outcome.batches, proofs, strict=False):
            for p in np.flatnonzero((wrong[: batch.accepted.size] != 0) & batch.accepted):
                item = wave.items[batch.members[p]]
                batch.accepted[p] = False
                rejected.append(int(batch.members[p]))
                log.error(
                    "a part did not decode to its own bits and is stored raw: %s, %d bytes, device %s, columns %s. "
                    "Please report this with the tensor",
                    item.spec,
                    item.words.numel(),
                    self.device,
                    batch.host_parts[p].tolist(),
                )
        wave.outcome.raw += rejected
        return rejected

    def decode(
        self, wave: DeviceWave, outs: Sequence[torch.Tensor], *, digest: bool = False
    ) -> torch.Tensor | None:
        """Decode a wave into tensors (flat uint8, as long as the parts, on the device); does not wait.

        Returns:
            int64[items]: digests of what was decoded, if asked for.
        """
        addresses = np.array([out.data_ptr() for out in outs], np.int64)
        for batch in wave.outcome.batches:
            for p in np.flatnonzero(batch.host_parts[:, f.ORDER_AT.value] >= 0):
                outs[batch.members[p]].zero_()
            decode_encoded(self.launcher, batch, batch.accepted, addresses[batch.members])
        for i, word in wave.outcome.constants.items():
            fill_words(outs[i], word, wave.items[i].word_bytes)
        for i in (*wave.outcome.raw, *wave.outcome.host):
            outs[i].copy_(wave.items[i].words)
        if not digest:
            return None
        sizes = np.array([out.numel() for out in outs], np.int64)
        return digest_ranges(self.launcher, addresses, sizes, np.zeros_like(sizes))

    def _constant_digest(self, item: EncodeItem, word: int) -> torch.Tensor:
        """Digest of what a constant part will decode to."""
        filled = torch.empty_like(item.words)
        fill_words(filled, word, item.word_bytes)
        size = np.array([filled.numel()], np.int64)
        return digest_ranges(
            self.launcher, np.array([filled.data_ptr()], np.int64), size, np.zeros_like(size)
        )

    def _digests(self, items: Sequence[EncodeItem], chosen: np.ndarray) -> torch.Tensor:
        addresses = np.array([items[i].words.data_ptr() for i in chosen], np.int64)
        sizes = np.array([items[i].words.numel() for i in chosen], np.int64)
        return digest_ranges(self.launcher, addresses, sizes, np.zeros_like(sizes))

    def _prove(self, items: Sequence[EncodeItem], batch: Batch, digests: torch.Tensor | None) -> torch.Tensor:
        """Decode the parts of a batch, as many at a time as fit the scratch memory, and compare their bits.

        Returns:
            int32[parts]: 0 where no bit differs; only that of parts that count says anything. digests: theirs are filled in.
        """
        launcher = self.launcher
        sizes = np.array([items[i].words.numel() for i in batch.members], np.int64)
        padded = -(-sizes // ALIGNMENT) * ALIGNMENT
        accepted = np.flatnonzero(batch.accepted)
        scratch = _scratch_bytes(int(batch.host_parts[:, f.NUM_ELEMS.value].sum()), len(sizes))
        budget = max(scratch, int(padded.max()))
        wrong = launcher.zeros(len(sizes), torch.int32)
        while accepted.size:
            take = max(int((np.cumsum(padded[accepted]) <= budget).sum()), 1)
            chosen, accepted = accepted[:take], accepted[take:]
            memory = launcher.empty(int(padded[chosen].sum()), torch.uint8)
            wanted = np.zeros(sizes.size, bool)
            wanted[chosen] = True
            places = np.zeros(sizes.size, np.int64)
            places[chosen] = memory.data_ptr() + starts(padded[chosen])
            if (batch.host_parts[chosen, f.ORDER_AT.value] >= 0).any():
                memory.zero_()
            errors = decode_encoded(launcher, batch, wanted, places)
            sources = np.array([items[i].words.data_ptr() for i in batch.members[chosen]], np.int64)
            at = launcher.upload(chosen)
            found = compare_ranges(launcher, sources, places[chosen], sizes[chosen])
            wrong[at] = errors[at] + found[: chosen.size]
            if digests is not None:
                # Of what was decoded, not of what is in memory now: the digest belongs to the bytes that are stored.
                own = digest_ranges(launcher, places[chosen], sizes[chosen], np.zeros_like(chosen))
                digests[launcher.upload(batch.members[chosen])] = own
        return wrong


def _scratch_bytes(num_elems: int, num_parts: int) -> int:
    return 4 * num_elems + num_elems // 16 + num_parts * PART_SCRATCH_BYTES


def fill_words(out: torch.Tensor, word: int, word_bytes: int) -> None:
    """Set all words of a flat uint8 tensor to one value."""
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[word_bytes]
    if word_bytes > 1 and word >= 1 << (8 * word_bytes - 1):
        word -= 1 << (8 * word_bytes)
    out.view(dtype).fill_(word)
