"""Encoding with nvCOMP, many parts at once.

What is to be encoded is first copied, so that the bytes that are digested, coded and proven are the same bytes, whatever
happens to the tensor meanwhile, and so that every block has the alignment that nvCOMP wants.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from thinpoint.codec.contract import EncodedPart
from thinpoint.codec.nvcomp import ANS_ALIGN_BYTES, ANS_BLOCK_BYTES, ANS_ID, ans_mode, ans_prefix
from thinpoint.codec.plan import BLOCK_ELEMS
from thinpoint.codec.raw import RAW_ID
from thinpoint.codec.zstd import ZSTD_ID
from thinpoint.device.contract import EncodeItem
from thinpoint.device.nvcomp_digest import digest_ranges
from thinpoint.device.nvcomp_layout import aligned_starts, clear, slices, up
from thinpoint.device.nvcomp_library import ZSTD, Algorithm, ans, library

_MIN_CODED_BYTES = {"nvcomp-zstd": 128, "nvcomp-ans": 4096}
"""Smaller parts are stored raw: the tables cost more than the coding saves."""

_log = logging.getLogger("thinpoint")


@dataclass(frozen=True, kw_only=True)
class Chain:
    """How a part is stored; without an algorithm, as it is."""

    codec_id: int
    name: str
    block_elems: int
    algorithm: Algorithm | None = None
    prefix: bytes = b""
    align_bytes: int = 8


_RAW = Chain(codec_id=RAW_ID, name="raw", block_elems=BLOCK_ELEMS)


def chain_of(codec: str, item: EncodeItem) -> Chain:
    if item.words.numel() < _MIN_CODED_BYTES[codec]:
        return _RAW
    if codec == "nvcomp-zstd":
        return Chain(codec_id=ZSTD_ID, name="zstd", block_elems=BLOCK_ELEMS, algorithm=ZSTD)
    mode, version = ans_mode(item.spec.dtype), library().version
    return Chain(
        codec_id=ANS_ID,
        name=f"nvcomp-ans {mode.name} {version}",
        block_elems=ANS_BLOCK_BYTES // item.word_bytes,
        algorithm=ans(mode),
        prefix=ans_prefix(mode, version),
        align_bytes=ANS_ALIGN_BYTES,
    )


@dataclass(frozen=True, kw_only=True)
class _Blocks:
    """Blocks of a wave that nvCOMP codes, in order of parts: int64 arrays of equal length.

    Attributes:
        part: index of the part.
        start, size: byte range in the copy of the wave.
        coded_start, coded_size: byte range in the coded memory, set by coding.
        failed: whether nvCOMP refused it.
    """

    part: np.ndarray
    start: np.ndarray
    size: np.ndarray
    coded_start: np.ndarray
    coded_size: np.ndarray
    failed: np.ndarray


@dataclass(frozen=True, kw_only=True)
class _Packed:
    """The stored blocks of a wave without gaps between parts: `starts[p]` and `sizes[p]` are those of part p's blocks."""

    memory: torch.Tensor
    starts: list[np.ndarray]
    sizes: list[np.ndarray]


class EncodeWave:
    """Encodes the parts of one wave."""

    def __init__(self, items: Sequence[EncodeItem], chains: list[Chain], device: torch.device) -> None:
        self._items, self._chains, self._device = items, chains, device
        self._sizes = np.array([item.words.numel() for item in items], np.int64)
        self._starts, total = aligned_starts(self._sizes)
        self._copy = torch.zeros(total, dtype=torch.uint8, device=device)
        torch._foreach_copy_(slices(self._copy, self._starts, self._sizes), [item.words for item in items])

    def run(self, prove: bool) -> list[EncodedPart]:
        """The parts. Their bytes are in host memory when the device's current stream has been waited for."""
        blocks, coded = self._code()
        shrunk = self._shrunk(blocks)
        packed = self._pack(blocks, coded, shrunk)
        if prove:
            different = self._different(blocks, packed, shrunk)
            if different.size:
                _log.error(
                    "nvCOMP did not give back the bits of %d of %d parts; they are stored raw",
                    different.size,
                    len(self._items),
                )
                shrunk[different] = False
                packed = self._pack(blocks, coded, shrunk)
        return self._parts(packed, shrunk)

    def _code(self) -> tuple[_Blocks, torch.Tensor]:
        """Every block that has an algorithm, coded, with room for the worst case behind each; waits for the device."""
        per_part = [self._block_ranges(p, c) for p, c in enumerate(self._chains) if c.algorithm is not None]
        part, start, size = (
            (np.concatenate(column) for column in zip(*per_part, strict=True))
            if per_part
            else (np.zeros(0, np.int64),) * 3
        )
        coded_start, coded_size = np.zeros_like(size), np.zeros_like(size)
        failed = np.zeros(size.size, bool)
        calls, total = [], 0
        for algorithm, members in self._alike(part, size):
            room = up(library().max_stored_bytes(algorithm, int(size[members].max())))
            coded_start[members] = total + room * np.arange(members.size)
            total += room * members.size
            calls.append((algorithm, members))
        coded = torch.empty(total, dtype=torch.uint8, device=self._device)
        results = [
            library().encode(
                algorithm,
                self._copy.data_ptr() + start[members],
                size[members],
                coded.data_ptr() + coded_start[members],
                self._device,
            )
            for algorithm, members in calls
        ]
        if results:
            found = torch.cat(results, dim=1).cpu().numpy()
            order = np.concatenate([members for _, members in calls])
            failed[order] = found[1] != 0
            coded_size[order] = np.where(found[1] == 0, found[0], 0)
        # Blocks are copied with their padding, which must be zero.
        clear(coded, coded_start + coded_size, coded_start + up(coded_size))
        blocks = _Blocks(
            part=part,
            start=start,
            size=size,
            coded_start=coded_start,
            coded_size=coded_size,
            failed=failed,
        )
        return blocks, coded

    def _block_ranges(self, part: int, chain: Chain) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Part, start and size of each block of a part."""
        step = chain.block_elems * self._items[part].word_bytes
        inside = np.arange(0, self._sizes[part], step, dtype=np.int64)
        size = np.minimum(step, self._sizes[part] - inside)
        return np.full(inside.size, part, np.int64), self._starts[part] + inside, size

    def _alike(self, part: np.ndarray, size: np.ndarray) -> Iterator[tuple[Algorithm, np.ndarray]]:
        """Blocks of one algorithm whose sizes differ by less than a factor of two: all of a call get the room of the largest."""
        kinds = [(self._chains[p].algorithm, int(s).bit_length()) for p, s in zip(part, size, strict=True)]
        for kind in dict.fromkeys(kinds):
            algorithm = kind[0]
            assert algorithm is not None
            yield algorithm, np.flatnonzero([other == kind for other in kinds])

    def _shrunk(self, blocks: _Blocks) -> np.ndarray:
        """For each part whether its coded form counts: nvCOMP refused no block, and it is smaller than raw."""
        align = np.array([chain.align_bytes for chain in self._chains], np.int64)
        stored = np.array([len(chain.prefix) for chain in self._chains], np.int64)
        np.add.at(stored, blocks.part, up(blocks.coded_size, align[blocks.part]))
        shrunk = stored < self._sizes
        shrunk &= np.array([chain.algorithm is not None for chain in self._chains])
        shrunk[blocks.part[blocks.failed]] = False
        return shrunk

    def _pack(self, blocks: _Blocks, coded: torch.Tensor, shrunk: np.ndarray) -> _Packed:
        """The blocks to store, one after the other; parts that do not count as shrunk are cut from the copy."""
        pieces: list[torch.Tensor] = []
        starts, sizes, end = [], [], 0
        for p, chain in enumerate(self._chains):
            if shrunk[p]:
                own = slice(*np.searchsorted(blocks.part, [p, p + 1]))
                size = up(blocks.coded_size[own], chain.align_bytes)
                pieces += slices(coded, blocks.coded_start[own], size)
                num_bytes = int(size.sum())
            else:
                size = up(self._block_ranges(p, _RAW)[2], 8)
                # In one piece that ends where a block may follow that must be aligned.
                num_bytes = int(up(size.sum()))
                pieces += slices(self._copy, self._starts[p : p + 1], [num_bytes])
            starts.append(end + np.cumsum(size) - size)
            sizes.append(size)
            end += num_bytes
        return _Packed(memory=torch.cat(pieces), starts=starts, sizes=sizes)

    def _different(self, blocks: _Blocks, packed: _Packed, shrunk: np.ndarray) -> np.ndarray:
        """Indices of the parts whose packed blocks do not decode to their bits; waits for the device."""
        proof = self._copy.bitwise_not()
        clear(proof, self._starts + self._sizes, self._starts + up(self._sizes))
        as_is = np.flatnonzero(~shrunk)
        if as_is.size:
            stored_raw = [packed.starts[p][0] for p in as_is]
            torch._foreach_copy_(
                slices(proof, self._starts[as_is], self._sizes[as_is]),
                slices(packed.memory, stored_raw, self._sizes[as_is]),
            )
        bad = np.zeros(len(self._items), bool)
        is_coded = shrunk[blocks.part]
        stored = np.zeros_like(blocks.start)
        if is_coded.any():
            stored[is_coded] = np.concatenate([packed.starts[p] for p in np.flatnonzero(shrunk)])
        for algorithm, members in self._alike(blocks.part, blocks.size):
            members = members[is_coded[members]]
            if not members.size:
                continue
            # As a reader does, who knows the size of an ANS block only with its padding.
            size = blocks.coded_size[members]
            result = library().decode(
                algorithm,
                packed.memory.data_ptr() + stored[members],
                size if algorithm is ZSTD else up(size),
                proof.data_ptr() + blocks.start[members],
                blocks.size[members],
                self._device,
            )
            found, status = result.cpu().numpy()
            bad[blocks.part[members[(status != 0) | (found != blocks.size[members])]]] = True
        words = torch.nonzero(proof.view(torch.int64) != self._copy.view(torch.int64)).reshape(-1)
        bad[np.searchsorted(self._starts, 8 * words.cpu().numpy(), side="right") - 1] = True
        return np.flatnonzero(bad)

    def _parts(self, packed: _Packed, shrunk: np.ndarray) -> list[EncodedPart]:
        host = torch.empty(packed.memory.numel(), dtype=torch.uint8, pin_memory=True)
        host.copy_(packed.memory, non_blocking=True)
        starts, sizes = np.concatenate(packed.starts), np.concatenate(packed.sizes)
        stored_digests = digest_ranges(packed.memory, starts, sizes, np.zeros_like(starts))
        raw_digests = digest_ranges(self._copy, self._starts, up(self._sizes, 8), np.zeros_like(self._starts))
        memory, parts, first = host.numpy(), [], 0
        for p, item in enumerate(self._items):
            chain = self._chains[p] if shrunk[p] else _RAW
            count = packed.sizes[p].size
            blocks = zip(packed.starts[p].tolist(), packed.sizes[p].tolist(), strict=True)
            parts.append(
                EncodedPart(
                    codec_id=chain.codec_id,
                    word_bytes=item.word_bytes,
                    num_elems=int(self._sizes[p]) // item.word_bytes,
                    block_elems=chain.block_elems,
                    prefix=chain.prefix,
                    block_sizes=packed.sizes[p][None],
                    blocks=(tuple(memory[start : start + size] for start, size in blocks),),
                    block_digests=stored_digests[None, first : first + count],
                    raw_digest=int(raw_digests[p]),
                    chain=chain.name,
                )
            )
            first += count
        return parts
