"""The backends: how a part is encoded and decoded with a given set of kernels, and which sets work here."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from thinpoint.codec import nvcomp, raw, zstd
from thinpoint.codec.contract import CodedPart, EncodedPart, Mapper, PartSpec, serial_map
from thinpoint.codec.plan import MIN_CODED_ELEMS, make_plan
from thinpoint.codec.rans import decoder, encoder
from thinpoint.codec.rans.kernels import Kernels
from thinpoint.codec.rans.spec import CODEC_ID as RANS_ID
from thinpoint.codec.transforms.split import choose_split
from thinpoint.errors import (
    BackendUnavailableError,
    EncodeProofError,
    MalformedFileError,
    UnknownCodecError,
    UsageError,
)

CODECS = ("thin", "zstd", "raw")
"""Names a user may ask for: our own chains, Zstandard frames, nothing."""

BACKENDS = ("cpu", "reference")
"""Kernel sets in order of preference."""

CODEC_NAMES = {
    raw.RAW_ID: "raw",
    raw.CONST_ID: "const",
    RANS_ID: "rans",
    zstd.ZSTD_ID: "zstd",
    nvcomp.ANS_ID: "nvcomp-ans",
}

_MIN_ZSTD_BYTES = 128
_ZSTD_GAIN_PERCENT = 95


@dataclass(frozen=True)
class HostBackend:
    """Encodes and decodes words in host memory.

    Attributes:
        kernels: the primitives of the rANS codec.
        codec: one of CODECS; what encode uses.
        prove: decode every encoded part and compare its bits before it is returned.
    """

    kernels: Kernels
    codec: str = "thin"
    prove: bool = False

    @property
    def name(self) -> str:
        return self.kernels.name

    def encode(self, words: np.ndarray, spec: PartSpec, *, map: Mapper = serial_map) -> EncodedPart:
        """See `Backend.encode`. words: uint8, uint16, uint32 or uint64, C-contiguous, at least one."""
        part = self._encode(words, spec, map)
        if self.prove:
            prove(self, part, map)
        return part

    def _encode(self, words: np.ndarray, spec: PartSpec, map: Mapper) -> EncodedPart:
        if self.codec == "raw":
            return raw.encode_raw(words, map)
        if self.codec == "zstd":
            return smaller(zstd.encode_zstd(words, map), words, map)
        scan = self.kernels.scan(words, map)
        if scan.or_mask == scan.and_mask:
            return raw.encode_const(words, map)
        split = choose_split(spec.dtype, words.itemsize, scan.or_mask, scan.and_mask)
        raw_bits = 8 * words.nbytes
        if split is None or words.size < MIN_CODED_ELEMS:
            if (split is not None and words.itemsize > 1) or words.nbytes < _MIN_ZSTD_BYTES:
                return raw.encode_raw(words, map)
            if zstd.sample_bits(words) * 100 < raw_bits * _ZSTD_GAIN_PERCENT:
                return smaller(zstd.encode_zstd(words, map), words, map)
            return raw.encode_raw(words, map)
        plan = make_plan(words, spec, split, scan, self.kernels, map)
        is_float = words.itemsize > 1 or spec.dtype.startswith("float")
        if (not is_float or 2 * plan.estimated_bits < raw_bits) and (
            zstd.sample_bits(words) * 100 < min(plan.estimated_bits, raw_bits) * _ZSTD_GAIN_PERCENT
        ):
            return smaller(zstd.encode_zstd(words, map), words, map)
        if plan.estimated_bits >= raw_bits:
            return raw.encode_raw(words, map)
        return smaller(encoder.encode(words, plan, scan, self.kernels, map), words, map)

    def decode(
        self,
        part: CodedPart,
        first_block: int,
        blocks: Sequence[Sequence[Any]],
        out: np.ndarray,
        *,
        map: Mapper = serial_map,
    ) -> int:
        """See `Backend.decode`."""
        if out.itemsize != part.word_bytes:
            raise UsageError(
                "the output has words of the wrong width", expected=part.word_bytes, actual=out.itemsize
            )
        if len({len(plane) for plane in blocks}) > 1 or len(blocks) != part.num_planes:
            raise MalformedFileError("the planes of a part have different numbers of blocks")
        if part.codec_id == RANS_ID:
            return decoder.decode(part, first_block, blocks, out, self.kernels, map)
        if part.codec_id == raw.RAW_ID:
            return raw.decode_raw(part, first_block, blocks, out, map)
        if part.codec_id == zstd.ZSTD_ID:
            return zstd.decode_zstd(part, first_block, blocks, out, map)
        if part.codec_id == raw.CONST_ID:
            return raw.decode_const(part, out, first_block * part.block_elems)
        if part.codec_id == nvcomp.ANS_ID:
            raise nvcomp.ans_unavailable(part.prefix, part.word_bytes, "it cannot be decoded on a CPU")
        raise UnknownCodecError(f"codec {part.codec_id} is not known to this version")


def smaller(part: EncodedPart, words: np.ndarray, map: Mapper) -> EncodedPart:
    """The part, or the raw chain if that is not larger: a file is at most raw plus a small header."""
    return part if part.stored_bytes < words.nbytes else raw.encode_raw(words, map)


def prove(backend: HostBackend, part: EncodedPart, map: Mapper) -> None:
    """Decode a part, a few blocks at a time, and compare the digest of its bits.

    Raises:
        EncodeProofError: the digests differ.
    """
    step = 16
    total = 0
    for first in range(0, max(part.num_blocks, 1), step):
        last = min(first + step, part.num_blocks)
        start = first * part.block_elems
        end = min(last * part.block_elems, part.num_elems) if part.num_planes else part.num_elems
        out = np.empty(end - start, f"<u{part.word_bytes}")
        blocks = [plane[first:last] for plane in part.blocks]
        total += backend.decode(part, first, blocks, out, map=map)
    if total & ((1 << 64) - 1) != part.raw_digest:
        raise EncodeProofError(
            f"a part coded with {part.chain} does not decode to its own bits",
            expected=f"{part.raw_digest:016x}",
            actual=f"{total & ((1 << 64) - 1):016x}",
        )


def availability() -> dict[str, str | None]:
    """For every backend: None if it works here, else the reason why not."""
    return {name: _why_not(name) for name in BACKENDS}


def _why_not(name: str) -> str | None:
    try:
        importlib.import_module(f"thinpoint.codec.rans.{name}")
    except ImportError as error:
        return f"{error}"
    return None


def get_backend(name: str = "auto", *, codec: str = "thin", prove: bool = False) -> HostBackend:
    """The backend of that name; "auto" takes the first of BACKENDS that works here.

    Raises:
        UsageError: no backend or codec has that name.
        BackendUnavailableError: the backend asked for by name cannot run here, with the reason.
    """
    if codec not in CODECS:
        raise UsageError(f"unknown codec {codec!r}", expected=" or ".join(CODECS))
    if name not in ("auto", *BACKENDS):
        raise UsageError(f"unknown backend {name!r}", expected=" or ".join(("auto", *BACKENDS)))
    reasons: list[str] = []
    for candidate in BACKENDS if name == "auto" else (name,):
        reason = _why_not(candidate)
        if reason is None:
            if reasons:
                _log_fallback(candidate, reasons[0])
            kernels: Any = importlib.import_module(f"thinpoint.codec.rans.{candidate}")
            return HostBackend(kernels, codec, prove)
        reasons.append(f"backend {candidate!r} cannot run here: {reason}")
    raise BackendUnavailableError("; ".join(reasons))


@cache
def _log_fallback(candidate: str, reason: str) -> None:
    """Say once why the automatic choice is not the fastest."""
    logging.getLogger("thinpoint").warning("using backend %r, which is slower: %s", candidate, reason)
