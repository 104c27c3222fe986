"""Codec "auto": compress, or store raw where the rates of earlier saves say that compressing makes training wait longer."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from thinpoint.engine.report import SaveReport
from thinpoint.pace import PROBE_EVERY, Rates, choose_codec, measured_rates

log = logging.getLogger("thinpoint")


@dataclass
class _Known:
    """What is known of saves to one place.

    Attributes:
        raw_bytes, ratio, rates: of the last save that compressed.
        codec: of the last save.
        num_raw: saves stored raw since the last one that compressed.
        has_told: the log has the reason.
    """

    raw_bytes: int
    ratio: float
    rates: Rates
    codec: str = "thin"
    num_raw: int = 0
    has_told: bool = False


class AutoCodec:
    """Chooses for each place by what saves there have taken. The first save compresses. May be shared between threads."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._lock = threading.Lock()

    def choose(self, place: str, *, mode: str) -> str:
        """ "thin" or "raw".

        Args:
            place: as `place_of` gives.
            mode: "sync" or "async".
        """
        with self._lock:
            known = self._known.get(place)
            if known is None or known.num_raw >= PROBE_EVERY:
                return "thin"
            choice = choose_codec(known.raw_bytes, known.ratio, known.rates, mode=mode, now=known.codec)
            if choice.codec == "raw" and not known.has_told:
                known.has_told = True
                log.warning("codec 'auto': %s", choice.reason)
            return choice.codec

    def learn(self, place: str, report: SaveReport) -> None:
        """Take in what a save has taken."""
        stages = report.stages
        storage_s = stages.get("storage", 0.0) + stages.get("commit", 0.0)
        with self._lock:
            known = self._known.get(place)
            if report.codec == "raw":
                if known is not None:
                    known.codec, known.num_raw = "raw", known.num_raw + 1
                return
            if not report.raw_bytes or not report.file_bytes:
                return
            rates = measured_rates(
                raw_bytes=report.raw_bytes,
                stored_bytes=report.file_bytes,
                encode_s=stages.get("encode", 0.0),
                write_s=storage_s,
            )
            self._known[place] = _Known(
                raw_bytes=report.raw_bytes,
                ratio=report.raw_bytes / report.file_bytes,
                rates=rates,
                codec="thin",
                has_told=known is not None and known.has_told,
            )


auto = AutoCodec()
"""Of this process."""


def place_of(path: Any) -> str:
    """What saves with the same rates have in common: the disk, the host of a URL, or the kind of object that is written to."""
    if not isinstance(path, str | os.PathLike):
        return type(path).__qualname__
    text = os.fspath(path)
    if isinstance(text, str) and "://" in text:
        parts = urlsplit(text)
        return f"{parts.scheme}://{parts.hostname or ''}"
    folder = Path(os.fsdecode(text)).absolute()
    for parent in folder.parents:
        try:
            return f"device {parent.stat().st_dev}"
        except OSError:
            continue
    return "device"
