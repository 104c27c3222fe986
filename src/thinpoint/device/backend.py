"""The Triton backend: parts on a device to encoded parts in host memory, and back."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

import torch

from thinpoint.codec.backend import HostBackend, get_backend
from thinpoint.codec.contract import EncodedPart
from thinpoint.device.contract import DecodeItem, EncodeItem, FinishDecode, PendingParts, at_item
from thinpoint.device.encoding import Flight
from thinpoint.device.incoming import Incoming, decode_on_host
from thinpoint.device.outgoing import Launched, Outgoing, OutgoingWave, OutgoingWords, Pending
from thinpoint.device.pinned import Arena, slab_pool
from thinpoint.device.transfers import HostCopies, OutOfMemory, free_bytes, on_device
from thinpoint.device.triton_codec import DeviceCodec
from thinpoint.errors import ThinpointError

log = logging.getLogger("thinpoint")

MAX_WAVE_ITEMS = 4096


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

    def begin_decode(self, data: torch.Tensor, items: Sequence[DecodeItem]) -> FinishDecode:
        """See `DeviceBackend.begin_decode`."""
        begun: list[Incoming] = []
        with torch.no_grad(), on_device(self.device), suppress(OutOfMemory):
            begun.append(self._incoming(data, items))
        return partial(self._finish_decode, data, items, begun)

    def _incoming(self, data: torch.Tensor, items: Sequence[DecodeItem]) -> Incoming:
        return Incoming(self.codec.launcher, self._host, data, items)

    def _finish_decode(
        self, data: torch.Tensor, items: Sequence[DecodeItem], begun: list[Incoming]
    ) -> list[int]:
        """Where memory is short, half of the items at a time; an item for which there is none goes through the CPU.

        Args:
            begun: the batch, if it was launched; emptied, so that nobody else keeps its memory.
        """
        with torch.no_grad(), on_device(self.device):
            with suppress(OutOfMemory):
                return (begun.pop() if begun else self._incoming(data, items)).results()
            if len(items) == 1:
                return [decode_on_host(self._host, data, items[0])]
            half = len(items) // 2
            first = self._finish_decode(data, items[:half], [])
            try:
                return first + self._finish_decode(data, items[half:], [])
            except ThinpointError as error:
                at_item(error, getattr(error, "item", 0) + half)
                raise


class PlainBackend(TritonBackend):
    """Stores words as they are: only copies them to the host, through page-locked memory."""

    name = "copies"

    def begin_batch(self, items: Sequence[EncodeItem]) -> PendingParts:
        """See `DeviceBackend.begin_batch`."""
        with torch.no_grad(), on_device(self.device):
            return Pending([OutgoingWords(item, self._copies()) for item in items])
