"""A digest that tells whether training has changed any weight."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from thinpoint.file.index import PartEntry
from thinpoint.file.layout import hex64


def trainable_digest(parts: Iterable[PartEntry]) -> str | None:
    """Digest of the bits of all weights among these parts, 32 hex digits; None if there are none."""
    weights = [part for part in parts if part.role == "weight"]
    if not weights:
        return None
    sums = blake2b(digest_size=16)
    for part in weights:
        sums.update(
            f"{part.storage} {part.start} {part.elems} {part.word_bytes} {hex64(part.raw_digest)}\n".encode()
        )
    return sums.hexdigest()
