"""What a codec that runs on an accelerator is given and gives back.

Tensors come and go as flat bytes on the device, many parts at once: a state has hundreds of tensors, and a launch or a
synchronisation for each would cost more than the coding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from thinpoint.codec.contract import CodedPart, EncodedPart, PartSpec
from thinpoint.errors import ThinpointError

if TYPE_CHECKING:
    import torch


class EncodeItem(NamedTuple):
    """One part to encode.

    Attributes:
        words: the part's bytes, flat uint8, contiguous, on the backend's device; only read.
        word_bytes: 1, 2, 4 or 8.
        spec: what the codec may know.
    """

    words: torch.Tensor
    word_bytes: int
    spec: PartSpec


class DecodeItem(NamedTuple):
    """Consecutive blocks of one part to decode.

    Attributes:
        part: the part. Untrusted.
        first_block: the first block to decode.
        num_blocks: how many; 0 for a part without planes, all of which `out` then takes.
        plane_offsets: for each plane, where its first block lies in the buffer given with the items; the others follow
            without gaps. Multiples of 8.
        digests: uint64, shape (planes, num_blocks): digests of the stored blocks, compared before the batch is finished.
        out: flat uint8, contiguous, on the backend's device, exactly as long as the blocks' words.
    """

    part: CodedPart
    first_block: int
    num_blocks: int
    plane_offsets: tuple[int, ...]
    digests: np.ndarray
    out: torch.Tensor


def at_item(error: ThinpointError, item: int) -> None:
    """Note which item of a batch an error is about."""
    error.item = item  # type: ignore[attr-defined]


@contextmanager
def item_named(item: int) -> Iterator[None]:
    """Errors raised inside get the attribute `item`."""
    try:
        yield
    except ThinpointError as error:
        at_item(error, item)
        raise


FinishDecode = Callable[[], list[int]]
"""Gives for each item the partial raw digest of what was decoded. Summed over a part, mod 2^64, it must equal the part's."""


class PendingParts(Protocol):
    """Encoded parts on their way to host memory. For one thread at a time, which need not be the one that began them."""

    @property
    def stored_bytes(self) -> int:
        """About how much host memory the parts take."""
        ...

    def send(self) -> None:
        """Begin to copy them; blocks until they are encoded. To be called when the next batch was begun."""
        ...

    def wait(self) -> None:
        """Blocks until their bytes are in host memory; gives the device's memory back."""
        ...

    def parts(self) -> list[EncodedPart]:
        """For each item its part, as `DeviceBackend.encode_batch` gives them; waits, and does the host's share of the work."""
        ...


@dataclass(frozen=True)
class FinishedParts:
    """`PendingParts` of which nothing is pending."""

    finished: list[EncodedPart]

    @property
    def stored_bytes(self) -> int:
        """What the parts take."""
        return sum(part.stored_bytes for part in self.finished)

    def send(self) -> None:
        """They are there."""

    def wait(self) -> None:
        """They are there."""

    def parts(self) -> list[EncodedPart]:
        """See `PendingParts.parts`."""
        return self.finished


class DeviceBackend(Protocol):
    """A codec on one device. All methods use the device's current stream and may be called from one thread at a time."""

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> torch.device: ...

    def begin_batch(self, items: Sequence[EncodeItem]) -> PendingParts:
        """Begin to encode parts, and wait for nothing if the backend need not.

        Another batch may be begun before this one is sent, and a third before its parts are there: one is encoded while the
        next is launched and the last is copied. The items' words must stay as they are until `PendingParts.wait` has
        returned: what does not shrink is copied itself. `send` and `wait` raise what encoding does.

        Raises:
            StateChangedError: words changed while they were being read.
        """
        ...

    def encode_batch(self, items: Sequence[EncodeItem]) -> list[EncodedPart]:
        """Encode parts; blocks until their bytes are in host memory.

        Returns:
            For each item its part, proven if the backend was made with `prove`. Blocks are views of page-locked memory
            that lives as long as any of them.

        Raises:
            StateChangedError: words changed while they were being read.
        """
        ...

    def begin_decode(self, data: torch.Tensor, items: Sequence[DecodeItem]) -> FinishDecode:
        """Begin to decode blocks into tensors on the device, and wait for nothing if the backend need not.

        Another batch may be begun before this one is finished: one is decoded while the next is launched.

        Args:
            data: flat uint8, host memory, best page-locked: the stored bytes of all items. It must stay until the end.

        Returns:
            What waits until the outputs are there. Called once, with the same stream current.

        Raises:
            DigestMismatchError, MalformedFileError, UnknownCodecError: an item is damaged; `error.item` is its index, and
                outputs may be partly written. What is returned raises them too.
        """
        ...
