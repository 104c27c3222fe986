"""NVIDIA's nvCOMP behind the device contract: `nvcomp-zstd` (standard Zstandard frames) and `nvcomp-ans` (its own format)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from thinpoint.codec.contract import EncodedPart
from thinpoint.codec.nvcomp import EXTRA
from thinpoint.device.contract import DecodeItem, EncodeItem, FinishDecode, FinishedParts
from thinpoint.device.nvcomp_decode import decode_items
from thinpoint.device.nvcomp_encode import EncodeWave, chain_of
from thinpoint.device.nvcomp_layout import waves
from thinpoint.device.nvcomp_library import library, why_not
from thinpoint.errors import BackendUnavailableError, UsageError

__all__ = ["CODECS", "NvcompBackend", "decode_items", "make_backend", "why_not"]

CODECS = ("nvcomp-zstd", "nvcomp-ans")


def make_backend(codec: str, device: torch.device, prove: bool) -> NvcompBackend:
    """A backend that encodes with one of CODECS. Logs a warning, once, of what files coded with nvcomp-ans will need.

    Raises:
        UsageError: another codec.
        BackendUnavailableError: nvCOMP cannot run there, with the reason.
    """
    if codec not in CODECS:
        raise UsageError(f"nvCOMP has no codec {codec!r}", expected=" or ".join(CODECS))
    reason = why_not() if device.type == "cuda" else f"it runs on NVIDIA GPUs, not on {device.type!r}"
    if reason is not None:
        raise BackendUnavailableError(f"codec {codec!r} cannot run here: {reason}")
    if codec == "nvcomp-ans":
        _warn_of_ans()
    return NvcompBackend(codec=codec, device=device, prove=prove)


@cache
def _warn_of_ans() -> None:
    logging.getLogger("thinpoint").warning(
        "nvcomp-ans is NVIDIA's own format: what is saved with it loads only on an NVIDIA GPU, with nvCOMP %s or one "
        "that reads its stream (%s)",
        library().version,
        EXTRA,
    )


@dataclass(frozen=True, kw_only=True)
class NvcompBackend:
    """See `DeviceBackend`. Encodes with nvCOMP; decodes what any codec made, all but `nvcomp-ans` on the CPU.

    Attributes:
        codec: one of CODECS.
        device: a CUDA device.
        prove: decode encoded blocks and compare every bit before they leave the device; what differs is stored raw.
    """

    codec: str
    device: torch.device
    prove: bool

    @property
    def name(self) -> str:
        return "nvcomp"

    def begin_batch(self, items: Sequence[EncodeItem]) -> FinishedParts:
        """See `DeviceBackend.begin_batch`. Its parts are there on return."""
        return FinishedParts(self.encode_batch(items))

    def encode_batch(self, items: Sequence[EncodeItem]) -> list[EncodedPart]:
        """See `DeviceBackend.encode_batch`. Needs about 10 times WAVE_BYTES of device memory, 22 times for nvcomp-zstd."""
        parts: list[EncodedPart] = []
        for wave in waves(items, [item.words.numel() for item in items]):
            chains = [chain_of(self.codec, item) for item in wave]
            parts += EncodeWave(wave, chains, self.device).run(self.prove)
        torch.cuda.current_stream(self.device).synchronize()
        return parts

    def begin_decode(self, data: torch.Tensor, items: Sequence[DecodeItem]) -> FinishDecode:
        """See `DeviceBackend.begin_decode`. All of it happens when it is finished."""
        return partial(decode_items, data, items)
